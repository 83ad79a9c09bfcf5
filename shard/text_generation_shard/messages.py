"""Messages to the device thread: in order of arrival, or of their numbers with several ranks."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from text_generation_shard.engine.ranks import Ranks
from text_generation_shard.errors import BatchError, OwnError, RankError


class Turn(NamedTuple):
    """A message whose turn it is."""

    number: int
    # The first missing message before it, which is no longer awaited; 0: none is missing.
    missing: int = 0
    # It does not need the missing messages.
    may_skip: bool = False


@dataclass(slots=True)
class _Taken:
    """A message that has not had its turn."""

    may_skip: bool
    is_ready: bool = False
    # Missing messages before it are no longer awaited.
    is_late: bool = False


class MessageOrder:
    """Owns which messages arrived, and which had their turn. It only decides.

    Turns follow the numbers, each number once. A message waits for those before it, until a
    message that may skip them has arrived, or one is late.
    """

    def __init__(self) -> None:
        self.last = 0
        """The number of the last message that had its turn."""
        self._taken: dict[int, _Taken] = {}

    def take(self, number: int, may_skip: bool) -> None:
        """Register a message that arrived; BatchError if its number is too low or a duplicate.
        `may_skip`: it needs no earlier message."""
        if number <= self.last or number in self._taken:
            newest = max(self._taken, default=self.last)
            raise BatchError(
                f"message {number} came again or too late: message {newest} was taken already; "
                "messages to several shards have consecutive numbers"
            )
        self._taken[number] = _Taken(may_skip)

    def set_ready(self, number: int) -> None:
        """The message is prepared and can have its turn."""
        self._taken[number].is_ready = True

    def missing(self, number: int) -> int:
        """The first message before this one that has not arrived; 0: none is missing, or this one
        had its turn."""
        if number in self._taken:
            for other in range(self.last + 1, number):
                if other not in self._taken:
                    return other
        return 0

    def set_late(self, number: int) -> None:
        """Stop waiting for the messages missing before it."""
        self._taken[number].is_late = True

    def due(self) -> Turn | None:
        """Give the next message its turn; None: it must wait."""
        number = min(self._taken, default=0)
        if not number or not self._taken[number].is_ready:
            return None
        is_gap = number > self.last + 1
        if is_gap and not any(item.may_skip or item.is_late for item in self._taken.values()):
            return None
        missing = self.last + 1 if is_gap else 0
        self.last = number
        return Turn(number, missing, self._taken.pop(number).may_skip)


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
