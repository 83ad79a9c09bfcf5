"""Messages to the device thread: in order of arrival, or of their numbers with several ranks."""

import asyncio
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from text_generation_process.defaults import (
    CONTEXT_UNIT,
    LEAST_STEP_DEADLINE_ON_GPU_S,
    LEAST_STEP_DEADLINE_S,
    WARMUP_ROWS,
)
from text_generation_proto import pb

from text_generation_shard.errors import BatchError, OwnError, RankError
from text_generation_shard.parallel import Collectives

_T = TypeVar("_T")
_Work = Callable[[], Any]
# Messages that a router sends before the first of them is answered.
_MOST_AHEAD = 4
_BEHIND = "the step before this one has failed"


def _nothing() -> None:
    pass


def _ignored(error: RankError) -> None:
    pass


@dataclass(slots=True)
class _Message:
    """A message that was taken and has not had its turn."""

    answer: "asyncio.Future[Any]"
    # It does not need the messages before it.
    may_skip: bool
    # Messages that are missing before it are no longer awaited.
    is_late: bool = False
    timer: asyncio.TimerHandle | None = None
    # None: it is not prepared.
    work: _Work | None = None
    is_ahead: bool = False
    undo: Callable[[], None] = _nothing


class Messages:
    """Carries out messages in the device thread. Used from one event loop.

    With one rank, in order of arrival. With several, in the order of their numbers: a message waits
    for those before it, until a message that may skip them has arrived, or one is late. Each that
    was taken is carried out, even if its call was cancelled: the other ranks carry it out, too.
    """

    def __init__(
        self,
        device_thread: ThreadPoolExecutor,
        collectives: Collectives | None = None,
        deadline_s: float = 0.0,
        on_gap: Callable[[], None] = _nothing,
        on_final: Callable[[RankError], None] = _ignored,
    ) -> None:
        """collectives: of several ranks. A missing message is awaited for `deadline_s`. `on_gap` is
        called in the device thread when messages are skipped, `on_final` in the event loop when
        another rank is lost."""
        self.device_thread = device_thread
        self.last_number = 0
        """The highest number taken."""
        self._collectives, self._deadline_s = collectives, deadline_s
        self._on_gap, self._on_final = on_gap, on_final
        self._messages: dict[int, _Message] = {}
        # The number of the last message that had its turn.
        self._last = 0
        # Set in the device thread if the last message failed: the error type of messages ahead.
        self._error: type[BatchError] | None = None

    def take(self, number: int, may_skip: bool = False) -> None:
        """Register a message; `run` or `abandon` must follow. may_skip: it resets all state, so it
        needs no earlier message. BatchError if the number is invalid."""
        if self._collectives is None:
            self.last_number = number or self.last_number
            return
        if not number:
            raise BatchError(
                "a message without a number came to one of several shards, which take messages in "
                "the order of their numbers; let the router of the same version send it"
            )
        if number <= self._last or number in self._messages:
            raise BatchError(
                f"message {number} came again or too late: message {self.last_number} was taken "
                "already; messages to several shards have consecutive numbers"
            )
        self.last_number = max(self.last_number, number)
        loop = asyncio.get_running_loop()
        message = self._messages[number] = _Message(loop.create_future(), may_skip)
        if self._is_missing(number) and not may_skip:
            message.timer = loop.call_later(self._deadline_s, self._expire, number)

    def abandon(self, number: int, error: BaseException) -> None:
        """Fail a message that was taken and could not be prepared; it still has its turn."""

        def fail() -> None:
            raise OwnError(f"message {number} failed early: {error or type(error).__name__}")

        # Its answer is not awaited.
        if self._collectives is not None:
            self.run(number, fail).cancel()

    def run(
        self,
        number: int,
        work: Callable[[], _T],
        is_ahead: bool = False,
        undo: Callable[[], None] = _nothing,
    ) -> "asyncio.Future[_T]":
        """The result of `work`, computed in the device thread. With several ranks, is_ahead: it was
        sent before the previous message was answered, and fails if that one failed, because the
        state of this rank may differ from the others'; `undo` runs if the message fails on this
        rank or another."""
        if self._collectives is None:
            return asyncio.get_running_loop().run_in_executor(self.device_thread, work)
        message = self._messages[number]
        message.work, message.is_ahead, message.undo = work, is_ahead, undo
        self._begin_due()
        return message.answer

    def close(self) -> None:
        """Cancel the messages of several ranks that have not begun."""
        for message in self._messages.values():
            if message.timer is not None:
                message.timer.cancel()
            message.answer.cancel()
        self._messages.clear()

    def _is_missing(self, number: int) -> bool:
        """Whether a message before this one has not arrived."""
        return any(other not in self._messages for other in range(self._last + 1, number))

    def _expire(self, number: int) -> None:
        if self._is_missing(number):
            self._messages[number].is_late = True
            self._begin_due()

    def _begin_due(self) -> None:
        """Submit the messages whose turn it is; the device thread keeps their order."""
        loop = asyncio.get_running_loop()
        while self._messages:
            number = min(self._messages)
            missing = self._last + 1 if number > self._last + 1 else 0
            others = self._messages.values()
            is_awaited = missing and not any(item.may_skip or item.is_late for item in others)
            if is_awaited or self._messages[number].work is None:
                return
            message, self._last = self._messages.pop(number), number
            if message.timer is not None:
                message.timer.cancel()
            done = loop.run_in_executor(
                self.device_thread, self._carry_out, number, missing, message
            )
            done.add_done_callback(partial(self._settle, message.answer))

    def _carry_out(self, number: int, missing: int, message: _Message) -> Any:
        """In the device thread. If it fails, other ranks stop waiting for this one in this message;
        missing: and in those from this number on, which are not carried out here. 0: none."""
        collectives = self._collectives
        assert collectives is not None, "only messages of several ranks have turns"
        if missing:
            self._error = OwnError
            # Another rank can only be in one of the first few.
            for lost in range(missing, min(number, missing + _MOST_AHEAD)):
                collectives.fail(lost)
            self._on_gap()
        try:
            collectives.begin(number)
            if message.is_ahead and self._error is not None:
                raise self._error(_BEHIND)
            if missing and not message.may_skip:
                raise OwnError(
                    f"message {number} came, but message {missing} before it did not come within "
                    f"{self._deadline_s:g} s: this shard does not know what the other shards have "
                    "computed"
                )
            assert message.work is not None, "only prepared messages have their turn"
            answer = message.work()
        except BaseException as error:
            is_alike = isinstance(error, BatchError) and not isinstance(error, OwnError)
            self._error = BatchError if is_alike else OwnError
            if not is_alike:
                collectives.fail(number)
            message.undo()
            raise
        self._error = None
        return answer

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


def deadline_of_ranks(result: pb.WarmupResponse, limits: pb.WarmupRequest, is_cpu: bool) -> float:
    """Seconds to wait for another rank: at least the time of the largest step, as another rank can
    be late by a part of it."""
    least_s = LEAST_STEP_DEADLINE_S if is_cpu else LEAST_STEP_DEADLINE_ON_GPU_S
    context_ns = result.prefill_context_ns * result.max_total_tokens / CONTEXT_UNIT
    token_ns = result.prefill_token_ns + context_ns
    num_rows = limits.max_batch_size
    decode_ns = result.decode_step_ns * max(1.0, num_rows / WARMUP_ROWS)
    return max(least_s, (decode_ns + token_ns * (limits.max_prefill_tokens + num_rows)) / 1e9)


def digest(number: int, found: pb.Generations) -> int:
    """64 bits over a step's choices and its message's number. See StepResponse."""
    counts = found.token_counts or [1] * len(found.request_ids)
    values = (number, *found.request_ids, *counts, *found.token_ids, *found.finish_reasons)
    packed = struct.pack(f"<{len(values)}Q", *values)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
