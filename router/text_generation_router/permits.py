"""How many generations run at the same time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from text_generation_router.errors import OverloadedError
from text_generation_router.scheduler.endings import EndingRate


class Permits:
    """Owns the permits and the rate at which they are returned."""

    def __init__(self, num: int) -> None:
        self._num = self.num_free = num
        self._rate = EndingRate()

    def check_could_fit(self, num: int) -> None:
        """Raises OverloadedError if `num` permits do not exist."""
        if num > self._num:
            raise OverloadedError(self._rate.retry_after_s(time.perf_counter(), num))

    @contextmanager
    def taken(self, num: int) -> Iterator[None]:
        """Takes all of `num` permits, or none. Raises OverloadedError with a `retry-after`."""
        now = time.perf_counter()
        if self.num_free < num:
            raise OverloadedError(self._rate.retry_after_s(now, num - self.num_free))
        if self.num_free == self._num:
            self._rate.begin(now)
        self.num_free -= num
        try:
            yield
        finally:
            self.num_free += num
            self._rate.end(time.perf_counter(), num)
