"""What answers have in common: ids, numbers as TGI prints them, headers with times, the tokens of
a text, and how long answers are sent."""

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from math import isfinite

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from text_generation_router.request import TIMES, Ending
from text_generation_router.services import Services
from text_generation_router.text.encoding import Encoding

# Tokens that are written in one go, in less than a millisecond.
_SLICE = 512
# Tokens up to which the answer is written at once, with its length.
_MOST_AT_ONCE = 4 * _SLICE
_pack_float32 = struct.Struct("f").pack


def make_id(prefix: str) -> str:
    """A new id as OpenAI and Anthropic make them, such as msg_0f…"""
    return f"{prefix}_{uuid.uuid4().hex}"


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON; NaN becomes null."""
    return Response(orjson.dumps(content), media_type="application/json", headers=headers)


def float32(value: float | None) -> float | None:
    """A 32-bit float as the shortest decimal that reads back as the same 32 bits."""
    return None if value is None or not isfinite(value) else float(_shortest(value))


def float32_json(value: float | None) -> str:
    """The JSON of `float32(value)`; one is written for every token."""
    if value is None or not isfinite(value):
        return "null"
    digits = _shortest(value)
    # Whole numbers and very small ones are spelled differently in JSON.
    if "." not in digits or "e" in digits:
        return orjson.dumps(float(digits)).decode()
    return digits


def _shortest(value: float) -> str:
    bits = _pack_float32(value)
    shortest = f"{value:.8g}"
    if _pack_float32(float(shortest)) != bits:
        return f"{value:.9g}"
    for shorter in (f"{value:.7g}", f"{value:.6g}"):
        if _pack_float32(float(shorter)) != bits:
            break
        shortest = shorter
    return shortest


def timing_headers(
    endings: Sequence[Ending], prompt_tokens: int, characters: int, services: Services
) -> dict[str, str]:
    """Sums over all sequences, as TGI has them: whole milliseconds, but x-compute-time in seconds.

    `prompt_tokens` and `characters` are those of all prompts, each counted once.
    """
    seconds = {name: sum(each.times[name] for each in endings) for name in TIMES}
    return {
        "x-compute-type": services.compute_type,
        "x-compute-time": f"{seconds['total_time']:.9f}",
        "x-compute-characters": str(characters),
        **{f"x-{name.replace('_', '-')}": str(int(seconds[name] * 1000)) for name in TIMES},
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(sum(ending.generated.generated_tokens for ending in endings)),
    }


class PieceResponse(StreamingResponse):
    """Makes each piece after the previous one was sent; other tasks run in between.

    `held` is entered here, and left when the answer is sent or its client has disconnected.
    `Connection` closes the connection of a client that stops reading.
    """

    media_type = "application/json"

    def __init__(
        self,
        pieces: Iterable[bytes],
        held: AbstractContextManager[None],
        headers: Mapping[str, str] | None,
    ) -> None:
        super().__init__(_in_turns(pieces), headers=headers)
        self._held = held
        held.__enter__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the answer has ended."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.__exit__(None, None, None)


def in_pieces(
    pieces: Iterable[bytes],
    services: Services,
    *,
    is_short: bool,
    num_bytes: int,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer of JSON, in pieces, which hold `num_bytes`; a short one at once, with its length.
    Raises OverloadedError where too many clients have not read theirs."""
    if is_short:
        return Response(b"".join(pieces), media_type="application/json", headers=headers)
    return PieceResponse(pieces, services.long_answers.taken(num_bytes), headers)


async def _in_turns(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


class TokenizedToken(BaseModel):
    """One token of /tokenize; `start` and `stop` are byte offsets into the input."""

    id: int = Field(description="The number of the token in the vocabulary.")
    text: str
    start: int = Field(description="Where the token begins, in bytes.")
    stop: int = Field(description="Where the token ends, in bytes.")


def token_answer(
    text: str, encoding: Encoding, pieces: Iterator[bytes], services: Services
) -> Response:
    """See `in_pieces`, which raises OverloadedError."""
    num = len(encoding.ids)
    num_bytes = encoding.num_bytes + len(text)
    return in_pieces(pieces, services, is_short=num <= _MOST_AT_ONCE, num_bytes=num_bytes)


def render_tokens(text: str, encoding: Encoding) -> Iterator[bytes]:
    """The JSON list of the tokens of a text, in pieces."""
    tokens = _tokens(text, encoding)
    before = b"["
    while some := list(islice(tokens, _SLICE)):
        yield before + orjson.dumps(some)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def _tokens(text: str, encoding: Encoding) -> Iterator[dict[str, object]]:
    is_ascii = text.isascii()
    # A place in the text, in characters and in bytes. Tokens mostly begin where the last one ended.
    place = place_bytes = 0
    for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if is_ascii:
            start_bytes, stop_bytes = start, stop
        else:
            start_bytes = place_bytes + _bytes_between(text, place, start)
            stop_bytes = start_bytes + _bytes_between(text, start, stop)
            place, place_bytes = stop, stop_bytes
        yield {
            "id": token_id,
            "text": text[start:stop],
            "start": start_bytes,
            "stop": stop_bytes,
        }


def _bytes_between(text: str, start: int, stop: int) -> int:
    """Negative if the second place is before the first."""
    if start > stop:
        return -_bytes_between(text, stop, start)
    return len(text[start:stop].encode())
