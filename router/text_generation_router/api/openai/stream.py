"""What streams of OpenAI's routes have in common: their start, their merging and their end."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import orjson

from text_generation_router.api.openai.errors import RequestError, describe
from text_generation_router.api.sse import event
from text_generation_router.chat.service import ChatGeneration
from text_generation_router.config import VERSION
from text_generation_router.errors import RouterError
from text_generation_router.infer import Generation
from text_generation_router.services import Services

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


class Chunk(NamedTuple):
    """One chunk of a stream: its choice, and what else it has."""

    choice: Json
    more: Json | None = None


def envelope(prefix: str, kind: str, services: Services, request_id: str | None = None) -> Json:
    """What every answer and every chunk of a stream starts with; `request_id`: the client's."""
    return {
        "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": services.config.model_names[0],
        "system_fingerprint": f"{VERSION}-native",
    }


class ChunkWriter:
    """Writes the chunks of one stream, of which all but the choice is written once and for all."""

    def __init__(self, head: Json) -> None:
        self._before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['

    def chunks(self, chunks: Iterable[Chunk]) -> bytes:
        """The chunks, for one write."""
        return b"".join(map(self._written, chunks))

    def _written(self, chunk: Chunk) -> bytes:
        more = b"}" if not chunk.more else b"," + orjson.dumps(chunk.more)[1:]
        return b"%b%b]%b\n\n" % (self._before, orjson.dumps(chunk.choice), more)


def usage(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0
) -> Json:
    """The `usage` object. Nothing is predicted here, and nothing is sound."""
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


def check_num_sequences(num: int, field: str, services: Services) -> None:
    """Raises RequestError for more sequences than could ever be let in together."""
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


def generated_tokens(generations: Iterable[Generation | ChatGeneration]) -> int:
    """Tokens of all generations, which have ended."""
    endings = [generation.ending for generation in generations]
    return sum(ending.generated.generated_tokens for ending in endings if ending is not None)


async def with_error_event(
    chunks: AsyncGenerator[bytes, None], path: str
) -> AsyncGenerator[bytes, None]:
    """The chunks. Raises what fails before the first; a later failure is the last event, in the
    words of the route at `path`."""
    has_begun = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
                has_begun = True
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, RouterError):
                logger.exception("A stream failed; this is a bug in the router")
            _, detail = describe(error, path)
            yield event({"error": detail}) + DONE


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """The items of all streams as they come, each with the index of its stream.

    None of them waits for another. The first failure is raised.
    """
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    waiting = {_next(stream): index for index, stream in enumerate(streams)}
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
                waiting[_next(streams[index])] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: AsyncIterator[Item]) -> "asyncio.Task[Item]":
    async def step() -> Item:
        return await anext(stream)

    return asyncio.create_task(step())
