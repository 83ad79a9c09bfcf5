"""What keeps large requests from delaying small ones: threads of their own, and room in memory."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from text_generation_router.errors import OverloadedError

# A large body, or a long answer, is done with in about this time.
_RETRY_AFTER_S = 1

Given = ParamSpec("Given")
Made = TypeVar("Made")


class Lane:
    """Threads for one kind of work; owns who is next.

    Work waits in the order in which it came. Whoever is cancelled while it waits gives its place
    back, and what it holds; work that has begun in a thread goes on to its end.
    """

    def __init__(self, name: str, num_threads: int, most_waiting: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._places = asyncio.Semaphore(num_threads)
        self._most_waiting = most_waiting
        self.num_waiting = 0
        """Callers of `run` that no thread works for yet."""

    async def run(
        self, work: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> Made:
        """What `work` returns or raises. Raises OverloadedError where too many wait already."""
        if self._most_waiting is not None and self.num_waiting >= self._most_waiting:
            raise OverloadedError(_RETRY_AFTER_S)
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        done = self._threads.submit(work, *args, **kwargs)
        # The place is given back when the thread is free, also if nobody waits for it any more.
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: _tell(loop, self._places.release))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Lets the threads end when their work does."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Room:
    """Owns how many bytes answers may hold in all while they are sent."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.num_taken = 0
        """Bytes that are held now."""

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Holds so many bytes for the block. Raises OverloadedError where they do not fit.

        What is larger than the room is let in alone.
        """
        if self.num_taken and self.num_taken + num_bytes > self._num_bytes:
            raise OverloadedError(_RETRY_AFTER_S)
        self.num_taken += num_bytes
        try:
            yield
        finally:
            self.num_taken -= num_bytes


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls in the loop, or here if that has been closed meanwhile: then nobody waits there."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        call()
