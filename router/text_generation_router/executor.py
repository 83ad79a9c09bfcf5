"""Limits on large requests, so that they do not delay small ones: threads and memory."""

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from text_generation_router.errors import OverloadedError

# A large body, or a long answer, takes about this long.
_RETRY_AFTER_S = 1

Given = ParamSpec("Given")
Made = TypeVar("Made")


class Executor:
    """A thread pool for one kind of work, first come, first served.

    Work that is cancelled while it waits is left out. Work that has begun runs to its end.
    """

    def __init__(self, name: str, num_threads: int, most_waiting: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._most = math.inf if most_waiting is None else num_threads + most_waiting
        # A running one stays until its thread is free; only sets may change in two threads.
        self._calls: set[Future[Any]] = set()

    async def run(
        self, work: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> Made:
        """Returns or raises what `work` does. Raises OverloadedError if too many calls wait."""
        if len(self._calls) >= self._most:
            raise OverloadedError(_RETRY_AFTER_S)
        # The pool keeps cancelled work until its turn, but not what it would work on.
        waiting = [partial(work, *args, **kwargs)]
        call = self._threads.submit(lambda: waiting.pop()())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await asyncio.wrap_future(call)
        finally:
            waiting.clear()

    def close(self) -> None:
        """Ends each thread after its present work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class MemoryBudget:
    """Owns the number of bytes that all long answers together may hold while they are sent."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.num_taken = 0
        """Bytes held now."""

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Holds `num_bytes` in the block. Raises OverloadedError if they do not fit.

        An answer larger than the limit is admitted when there is no other one.
        """
        if self.num_taken and self.num_taken + num_bytes > self._num_bytes:
            raise OverloadedError(_RETRY_AFTER_S)
        self.num_taken += num_bytes
        try:
            yield
        finally:
            self.num_taken -= num_bytes
