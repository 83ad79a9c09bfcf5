"""Messages to the device thread: in order of arrival, or of their numbers with several ranks."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from text_generation_shard.engine.ranks import Ranks
from text_generation_shard.errors import BatchError, OwnError, RankError

_T = TypeVar("_T")


def _nothing() -> None:
    pass


class Messages:
    """Carries out messages in the device thread, in order of arrival. Used from one event loop."""

    def __init__(self, device_thread: ThreadPoolExecutor) -> None:
        self.device_thread = device_thread
        self.last_number = 0
        """The highest number taken."""

    def take(self, number: int, may_skip: bool = False) -> None:
        """Register a message; `run` or `abandon` must follow. may_skip: it resets all state, so it
        needs no earlier message. BatchError if the number is invalid."""
        if number:
            self.last_number = number

    def abandon(self, number: int, error: BaseException) -> None:
        """Fail a message that was taken and could not be prepared; it still has its turn."""

    def run(
        self,
        number: int,
        work: Callable[[], _T],
        is_ahead: bool = False,
        undo: Callable[[], None] = _nothing,
    ) -> "asyncio.Future[_T]":
        """The result of `work`, computed in the device thread. With several ranks, `is_ahead`: see
        Ranks; `undo` runs if the message fails on this rank or another."""
        return asyncio.get_running_loop().run_in_executor(self.device_thread, work)

    def close(self) -> None:
        """Cancel the messages that have not begun."""


@dataclass(slots=True)
class _Message:
    """A message that has not had its turn."""

    answer: "asyncio.Future[Any]"
    # It needs none of the messages before it.
    may_skip: bool
    # None: it is not prepared yet.
    work: Callable[[], Any] | None = None
    is_ahead: bool = False
    undo: Callable[[], None] = _nothing


class NumberedMessages(Messages):
    """Messages to one of several ranks. Owns which of them have had their turn.

    Turns follow the numbers, each number once. A message waits for those before it, until one that
    may skip them has arrived. Each message that was taken is carried out, even if its call was
    cancelled: the other ranks carry it out, too.
    """

    def __init__(
        self,
        device_thread: ThreadPoolExecutor,
        ranks: Ranks,
        on_gap: Callable[[], None],
        on_final: Callable[[RankError], None],
    ) -> None:
        """`on_gap` is called in the device thread when messages are skipped, `on_final` in the
        event loop when another rank is lost."""
        super().__init__(device_thread)
        self._ranks, self._on_gap, self._on_final = ranks, on_gap, on_final
        self._waiting: dict[int, _Message] = {}
        # The number of the last message that had its turn.
        self._last = 0

    def take(self, number: int, may_skip: bool = False) -> None:
        """See Messages."""
        if not number:
            raise BatchError(
                "a message without a number came to one of several shards, which take messages in "
                "the order of their numbers; let the router of the same version send it"
            )
        if number <= self._last or number in self._waiting:
            newest = max(self._waiting, default=self._last)
            raise BatchError(
                f"message {number} came again or too late: message {newest} was taken already; "
                "messages to several shards have consecutive numbers"
            )
        self.last_number = max(self.last_number, number)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Message(answer, may_skip)

    def abandon(self, number: int, error: BaseException) -> None:
        """See Messages."""

        def fail() -> None:
            raise OwnError(f"message {number} failed early: {error or type(error).__name__}")

        # Its answer is not awaited.
        self.run(number, fail).cancel()

    def run(
        self,
        number: int,
        work: Callable[[], _T],
        is_ahead: bool = False,
        undo: Callable[[], None] = _nothing,
    ) -> "asyncio.Future[_T]":
        """See Messages."""
        message = self._waiting[number]
        message.work, message.is_ahead, message.undo = work, is_ahead, undo
        self._begin_due()
        return message.answer

    def close(self) -> None:
        """See Messages."""
        for message in self._waiting.values():
            message.answer.cancel()
        self._waiting.clear()

    def _begin_due(self) -> None:
        """Submit the messages whose turn it is; the device thread keeps their order."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            number, first = min(self._waiting), self._last + 1
            message = self._waiting[number]
            may_skip = any(other.may_skip for other in self._waiting.values())
            if message.work is None or (number > first and not may_skip):
                return
            del self._waiting[number]
            self._last = number
            work = partial(self._carry_out, first, number, message)
            done = loop.run_in_executor(self.device_thread, work)
            done.add_done_callback(partial(self._settle, message.answer))

    def _carry_out(self, first: int, number: int, message: _Message) -> Any:
        """In the device thread. Messages [first, number) did not come."""
        work = message.work
        assert work is not None, "a message is prepared before its turn"
        if first < number:
            self._ranks.skip(first, number)
            self._on_gap()
            if not message.may_skip:
                work = partial(_refuse, first, number)
        try:
            return self._ranks.carry_out(number, work, message.is_ahead)
        except BaseException:
            message.undo()
            raise

    def _settle(self, answer: "asyncio.Future[Any]", done: "asyncio.Future[Any]") -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, RankError) and error.is_final:
            self._on_final(error)
        if answer.done():
            return
        if done.cancelled():
            answer.cancel()
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())


def _refuse(missing: int, number: int) -> None:
    raise OwnError(
        f"message {number} came, but not message {missing} before it: this shard does not know "
        "what the other shards have computed"
    )
