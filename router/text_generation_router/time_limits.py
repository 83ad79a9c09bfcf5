"""Ends requests that take too long, in the queue or in total."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial

from text_generation_router.errors import QueueWaitError
from text_generation_router.request_options import Deadline
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.entry import Entry

# How long the head of a stream with a time limit is held back, so that a refusal can have a status.
# Proxies close connections that are silent for longer.
MOST_HELD_S = 15.0
# From admission to the first token.
_PREFILL_S = 1.0


class TimeLimits:
    """Ends entries that exceed their time. No cost without a limit."""

    def __init__(self, batcher: Batcher, max_queue_wait_s: float | None = None) -> None:
        self._batcher = batcher
        self._max_queue_wait_s = max_queue_wait_s

    def over(
        self, entries: Sequence[Entry], deadline: Deadline | None
    ) -> AbstractContextManager[None]:
        """In the block, the limits apply to these entries of one prompt."""
        if deadline is None and self._max_queue_wait_s is None:
            return nullcontext()
        return self._over(entries, deadline)

    @contextmanager
    def _over(self, entries: Sequence[Entry], deadline: Deadline | None) -> Iterator[None]:
        with ExitStack() as stack:
            if deadline is not None:
                stack.enter_context(deadline.ends(partial(self._end, entries, deadline)))
            if (seconds := self._max_queue_wait_s) is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(seconds, self._refuse, entries, seconds)
                stack.callback(timer.cancel)
            yield

    async def begun(self, entry: Entry, deadline: Deadline | None) -> None:
        """If time is limited, waits until the entry has an output, so that a refusal comes before
        the head of the answer, but at most MOST_HELD_S or the queue wait. Raises the error of the
        entry."""
        if deadline is None and self._max_queue_wait_s is None:
            return
        most_s = MOST_HELD_S
        if self._max_queue_wait_s is not None:
            most_s = max(most_s, self._max_queue_wait_s + _PREFILL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await entry.ready()

    def _end(self, entries: Sequence[Entry], deadline: Deadline) -> None:
        for entry in entries:
            self._batcher.cancel(entry, deadline.error())

    def _refuse(self, entries: Sequence[Entry], seconds: float) -> None:
        """Ends the entries unless one was admitted: then their request has begun, and the others
        may be waiting for that one."""
        if any(entry.timings is not None for entry in entries):
            return
        retry_after_s = self._batcher.queue_retry_s()
        for entry in entries:
            self._batcher.cancel(entry, QueueWaitError(seconds, retry_after_s))
