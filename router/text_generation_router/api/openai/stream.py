"""Parts that the answers of /v1/completions and /v1/chat/completions share."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import Response

from text_generation_router.api.answers import (
    DONE,
    event,
    json_response,
    open_stream,
    timing_headers,
)
from text_generation_router.api.body import warning
from text_generation_router.api.errors import RequestError, end_as_openai
from text_generation_router.api.logprobs import TokenTrail
from text_generation_router.api.openai.sampling import SamplingBody, VllmBody
from text_generation_router.config import VERSION
from text_generation_router.request import (
    Ending,
    FinishReason,
    GenerateResult,
    TokenOutput,
)
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.validation import GenerateParameters

Item = TypeVar("Item")
Json = dict[str, Any]


def envelope(prefix: str, kind: str, services: Services, request_id: str | None = None) -> Json:
    """The first fields of every answer and chunk; `request_id`: the client's."""
    return {
        "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": services.config.model_names[0],
        "system_fingerprint": f"{VERSION}-native",
    }


class ChunkWriter:
    """Writes the chunks of one stream; the fields before the choice are encoded once."""

    def __init__(self, head: Json, body: SamplingBody) -> None:
        self._has_usage = body.includes_usage
        if body.includes_usage and not body.tells_usage:
            head = head | {"usage": None}
        self._head = head
        self._before = b"data: " + orjson.dumps(head)[:-1] + b","

    def chunks(self, chunks: Iterable[Json]) -> bytes:
        """The chunks, for one write; each is its choice, and what else it has."""
        before = self._before
        return b"".join([before + orjson.dumps(chunk)[1:] + b"\n\n" for chunk in chunks])

    def end(self, usage: Callable[[], Json]) -> bytes:
        """What comes behind the last choice: the usage of all, if it is asked for."""
        if not self._has_usage:
            return DONE
        return event(self._head | {"choices": [], "usage": usage()}) + DONE


def usage(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0
) -> Json:
    """The `usage` object. There are no predicted and no audio tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_tokens": 0,
        },
    }


class ChoiceWriter(ABC):
    """Writes one choice. Owns the ids of its tokens since the last chunk, and their number."""

    def __init__(
        self,
        index: int,
        body: VllmBody,
        made: Entry | GenerateResult,
        tokenizer: Tokenizer,
    ) -> None:
        self.index = index
        self.body = body
        self.made = made
        self.parts: Any = made
        """What becomes ready of the choice, in turn."""
        self.tokenizer = tokenizer
        self.trail = TokenTrail(body.shows_special_tokens)
        self.as_ids = bool(body.return_tokens_as_token_ids)
        # As they are needed for each token.
        self._tells_ids, self._tells_usage = bool(body.return_token_ids), body.tells_usage
        self._num_tokens = 0
        self._new_ids: list[int] = []

    @abstractmethod
    def chunks(self, part: Any) -> list[Json]:
        """What is new with one of `parts`; nothing where all of it is held back."""

    def count(self, outputs: Sequence[TokenOutput]) -> None:
        """More tokens, of which the next chunk tells."""
        self._num_tokens += len(outputs)
        if self._tells_ids:
            self._new_ids += [output.token.id for output in outputs]

    def chunk(self, choice: Json) -> Json:
        """A chunk, with the ids of all tokens since the previous one."""
        if self._tells_ids:
            choice["token_ids"], self._new_ids = self._new_ids, []
        return self.told({"choices": [choice]})

    def ended(self, otherwise: str = "stop") -> Json:
        """Why the choice, which has ended, did, in OpenAI's words; `otherwise` than by its
        length."""
        assert self.made.ending is not None
        generated = self.made.ending.generated
        is_full = generated.finish_reason is FinishReason.LENGTH
        end: Json = {"finish_reason": "length" if is_full else otherwise}
        if self.body.tells_stop_reason:
            end["stop_reason"] = generated.stop_reason
        return end

    def told(self, chunk: Json) -> Json:
        """The chunk, with the usage of this choice so far if each chunk has it."""
        if self._tells_usage:
            made = self.made
            chunk["usage"] = usage(made.prompt_tokens, made.cached_tokens, self._num_tokens)
        return chunk


async def stream_response(
    path: str,
    head: Json,
    body: VllmBody,
    started: AbstractAsyncContextManager[Sequence[ChoiceWriter]],
    total: Callable[[Sequence[Any]], Json],
    characters: int,
    services: Services,
) -> Response:
    """The chunks of all choices, which run at the same time, each behind the fields of `head`. In
    the block of `started` they run; `total` is the usage once they have ended."""

    async def stream() -> AsyncGenerator[bytes]:
        """Chunks that are ready together are one piece."""
        chunk_writer = ChunkWriter(head, body)
        async with started as writers, aclosing(merged([one.parts for one in writers])) as parts:
            async for index, part in parts:
                if chunks := writers[index].chunks(part):
                    yield chunk_writer.chunks(chunks)
        yield chunk_writer.end(lambda: total(writers))

    headers = {
        "x-compute-type": services.compute_type,
        "x-compute-characters": str(characters),
        **warning(body),
    }
    return await open_stream(stream(), headers, partial(end_as_openai, path))


def whole_response(
    answer: Json, body: VllmBody, endings: Sequence[Ending], characters: int, services: Services
) -> Response:
    """The answer of generations that have ended so."""
    prompt_tokens = answer["usage"]["prompt_tokens"]
    times = timing_headers(endings, prompt_tokens, characters, services)
    return json_response(answer, warning(body) | times)


def generated_tokens(endings: Iterable[Ending | None]) -> int:
    """Tokens of all generations, which have ended."""
    return sum(ending.generated.generated_tokens for ending in endings if ending is not None)


def check_num_sequences(num: int, field: str, services: Services) -> None:
    """Raises RequestError for more sequences than can ever run at the same time."""
    config = services.config
    limit, name = config.max_concurrent_requests, "--max-concurrent-requests"
    of_a_key = config.max_concurrent_requests_per_key
    if of_a_key is not None and of_a_key < limit:
        limit, name = of_a_key, "--max-concurrent-requests-per-key"
    if num > limit:
        raise RequestError(
            f"`{field}` asks for {num} sequences in one request; this server takes at most {limit} "
            f"({name})",
            field,
        )


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """The items of all streams in order of arrival, each with the index of its stream. Raises the
    first failure."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# Bounds the memory and the time of one answer.
MOST_PROMPT_ENTRIES = 2**19
_FEW_ENTRIES = 4096


class PromptEntries:
    """Counts the log-probabilities of prompts that one answer has, each choice with its own."""

    def __init__(self, asked: GenerateParameters, num_choices: int, field: str) -> None:
        """`num_choices`: of each prompt; `field`: the one that requests them."""
        tokens_each = 1 + (asked.top_n_tokens or 0)
        self._per_token = num_choices * tokens_each if asked.decoder_input_details else 0
        self._field = field
        self._num = 0

    async def answered(self, make: Callable[[], Item]) -> Item:
        """The answer; a thread makes one with many entries, so that streams do not wait."""
        return make() if self._num <= _FEW_ENTRIES else await asyncio.to_thread(make)

    def add(self, prompt_tokens: int) -> None:
        """One more prompt. Raises RequestError where the answer would have too many."""
        self._num += prompt_tokens * self._per_token
        if self._num > MOST_PROMPT_ENTRIES:
            raise RequestError(
                f"`{self._field}` asks for at least {self._num} log-probabilities of prompts; one "
                f"answer can have {MOST_PROMPT_ENTRIES}: send fewer prompts, or ask for fewer of "
                "the best tokens or of the answers",
                self._field,
            )
