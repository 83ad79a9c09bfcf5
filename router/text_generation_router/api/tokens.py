"""The tokens of a text as /tokenize and /chat_tokenize answer them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from text_generation_router.encoding import Encoding
from text_generation_router.services import Services

# Tokens that are written in one go, in less than a millisecond.
_SLICE = 512
# Tokens up to which the answer is written at once, with its length.
_MOST_AT_ONCE = 4 * _SLICE


class PieceResponse(StreamingResponse):
    """Makes each piece after the previous one was sent; other tasks run in between.

    `held` is entered here, and left when the answer is sent or its client has disconnected.
    `Connection` closes the connection of a client that stops reading.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes], held: AbstractContextManager[None]) -> None:
        super().__init__(_in_turns(pieces))
        self._held = held
        held.__enter__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the answer has ended."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.__exit__(None, None, None)


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
    """The answer in pieces, or at once if it is short. Raises OverloadedError where too many
    clients have not read theirs."""
    if len(encoding.ids) <= _MOST_AT_ONCE:
        return Response(b"".join(pieces), media_type="application/json")
    held = services.long_answers.taken(encoding.num_bytes + len(text))
    return PieceResponse(pieces, held)


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
