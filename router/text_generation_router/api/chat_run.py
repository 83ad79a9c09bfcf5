"""One chat that is answered in named events, as Anthropic's Messages and OpenAI's Responses are."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response

from text_generation_router.api.answers import json_response
from text_generation_router.api.sse import COMMENT, open_stream
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.service import ChatGeneration, ChatStep
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services

Json = dict[str, Any]


class ChatRun(ABC):
    """Answers one request, whole or as events: a whole answer is what the events spell."""

    def __init__(self, conversation: Conversation, is_stream: bool, services: Services) -> None:
        self._conversation = conversation
        self._is_stream = is_stream
        self.services = services
        self.answer: Json = {}
        """The whole answer, complete once `end` was called."""

    @abstractmethod
    async def begin(self, entry: Entry) -> Sequence[Json]:
        """The first events. Raises RouterError."""

    @abstractmethod
    def feed(self, step: ChatStep) -> Iterable[Json]:
        """The events of the next step."""

    @abstractmethod
    def end(self, generation: ChatGeneration) -> Sequence[Json]:
        """The last events, of a generation that has ended."""

    @abstractmethod
    def written(self, events: Sequence[Json]) -> bytes:
        """The events for one write."""

    @abstractmethod
    def failed(self, error: Exception) -> bytes:
        """The last events of a stream that failed."""

    async def response(
        self,
        headers: Mapping[str, str],
        keep_alive: bytes = COMMENT,
        has_status: Callable[[Exception], bool] = lambda error: True,
    ) -> Response:
        """The answer, whole or as a stream; see `open_stream`. Raises RouterError."""
        if self._is_stream:
            chunks = self._chunks()
            return await open_stream(chunks, headers, self.failed, keep_alive, has_status)
        async for _ in self._events():
            continue
        return json_response(self.answer, headers)

    async def _chunks(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._events()) as batches:
            async for batch in batches:
                yield self.written(batch)

    async def _events(self) -> AsyncGenerator[Sequence[Json]]:
        """The events, those together that are ready together. Raises RouterError."""
        services = self.services
        started = services.chat.start(self._conversation, services.options)
        async with started as (generation,):
            generation.entry.is_shown = self._is_stream
            yield await self.begin(generation.entry)
            async for steps in generation:
                if made := [event for step in steps for event in self.feed(step)]:
                    yield made
        yield self.end(generation)
