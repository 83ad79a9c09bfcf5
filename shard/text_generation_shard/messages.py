"""The queue to the device thread: messages in order of arrival, or of their numbers."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from text_generation_shard.engine.ranks import Ranks
from text_generation_shard.errors import BatchError, OwnError, RankError
from text_generation_shard.message_order import MessageOrder, Turn

_T = TypeVar("_T")
_Work = Callable[[], Any]


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
class _Waiting:
    """A message that was taken."""

    answer: "asyncio.Future[Any]"
    # Fires when an earlier message has been missing for too long.
    timer: asyncio.TimerHandle | None = None
    work: _Work = _nothing
    is_ahead: bool = False
    undo: Callable[[], None] = _nothing


class NumberedMessages(Messages):
    """Messages to one of several ranks, in the order of their numbers.

    Each message that was taken is carried out, even if its call was cancelled: the other ranks
    carry it out, too.
    """

    def __init__(
        self,
        device_thread: ThreadPoolExecutor,
        ranks: Ranks,
        deadline_s: float,
        on_gap: Callable[[], None],
        on_final: Callable[[RankError], None],
    ) -> None:
        """A missing message is awaited for `deadline_s`. `on_gap` is called in the device thread
        when messages are skipped, `on_final` in the event loop when another rank is lost."""
        super().__init__(device_thread)
        self._ranks, self._deadline_s = ranks, deadline_s
        self._on_gap, self._on_final = on_gap, on_final
        self._order = MessageOrder()
        self._waiting: dict[int, _Waiting] = {}

    def take(self, number: int, may_skip: bool = False) -> None:
        """See Messages."""
        if not number:
            raise BatchError(
                "a message without a number came to one of several shards, which take messages in "
                "the order of their numbers; let the router of the same version send it"
            )
        self._order.take(number, may_skip)
        self.last_number = max(self.last_number, number)
        loop = asyncio.get_running_loop()
        waiting = self._waiting[number] = _Waiting(loop.create_future())
        if self._order.missing(number) and not may_skip:
            waiting.timer = loop.call_later(self._deadline_s, self._expire, number)

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
        waiting = self._waiting[number]
        waiting.work, waiting.is_ahead, waiting.undo = work, is_ahead, undo
        self._order.set_ready(number)
        self._begin_due()
        return waiting.answer

    def close(self) -> None:
        """See Messages."""
        for waiting in self._waiting.values():
            if waiting.timer is not None:
                waiting.timer.cancel()
            waiting.answer.cancel()
        self._waiting.clear()

    def _expire(self, number: int) -> None:
        if self._order.missing(number):
            self._order.set_late(number)
            self._begin_due()

    def _begin_due(self) -> None:
        """Submit the messages whose turn it is; the device thread keeps their order."""
        loop = asyncio.get_running_loop()
        while (turn := self._order.due()) is not None:
            waiting = self._waiting.pop(turn.number)
            if waiting.timer is not None:
                waiting.timer.cancel()
            done = loop.run_in_executor(self.device_thread, self._carry_out, turn, waiting)
            done.add_done_callback(partial(self._settle, waiting.answer))

    def _carry_out(self, turn: Turn, waiting: _Waiting) -> Any:
        """In the device thread."""
        work = waiting.work
        if turn.missing:
            self._ranks.skip(turn.missing, turn.number)
            self._on_gap()
            if not turn.may_skip:
                work = partial(_refuse, turn, self._deadline_s)
        try:
            return self._ranks.carry_out(turn.number, work, waiting.is_ahead)
        except BaseException:
            waiting.undo()
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


def _refuse(turn: Turn, deadline_s: float) -> None:
    raise OwnError(
        f"message {turn.number} came, but message {turn.missing} before it did not come within "
        f"{deadline_s:g} s: this shard does not know what the other shards have computed"
    )
