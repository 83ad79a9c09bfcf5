"""How fast requests end: the source of `retry-after`."""

import math
from collections import deque

# Only the last endings count, and only within the window.
MAX_ENDINGS = 64
WINDOW_S = 60.0


class EndingRate:
    """Owns the times of the last endings, in seconds of one monotonic clock.

    It measures from the first request to an idle server: the rate of endings under low load says
    nothing about high load.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._times: deque[float] = deque(maxlen=MAX_ENDINGS)

    def begin(self, now: float) -> None:
        """The first request has come to an idle server."""
        self._since = now
        self._times.clear()

    def end(self, now: float, num: int) -> None:
        """`num` requests have ended."""
        self._times.extend([now] * min(num, MAX_ENDINGS))

    def retry_after_s(self, now: float, num: int) -> int:
        """In how many whole seconds, 1 to 60, `num` requests will have ended.

        Before the first ending: the time since `begin`, for each.
        """
        while self._times and self._times[0] < now - WINDOW_S:
            self._times.popleft()
        start = max(self._since, now - WINDOW_S)
        if len(self._times) == MAX_ENDINGS:
            start = self._times[0]
        seconds = num * (now - start) / max(1, len(self._times))
        return max(1, math.ceil(min(seconds, WINDOW_S)))
