"""How fast requests end, for those who ask when it is worth coming again."""

import math
from collections import deque

# Only the last endings count, and none that is older.
MAX_ENDINGS = 64
WINDOW_S = 60.0


class EndingRate:
    """Owns the times of the last endings. Every time is seconds of one clock, and never goes back.

    What is measured begins when the first request comes into an empty house: how rarely requests
    end while there are few says nothing about a time in which there are many.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._times: deque[float] = deque(maxlen=MAX_ENDINGS)

    def begin(self, now: float) -> None:
        """The house is no longer empty."""
        self._since = now
        self._times.clear()

    def end(self, now: float, num: int) -> None:
        """So many requests have ended."""
        self._times.extend([now] * min(num, MAX_ENDINGS))

    def retry_after_s(self, now: float, num: int) -> int:
        """In how many whole seconds, 1 to 60, `num` requests will have ended.

        While none has ended it is as long again as it has been already.
        """
        while self._times and self._times[0] < now - WINDOW_S:
            self._times.popleft()
        start = max(self._since, now - WINDOW_S)
        if len(self._times) == MAX_ENDINGS:
            start = self._times[0]
        seconds = num * (now - start) / max(1, len(self._times))
        return max(1, math.ceil(min(seconds, WINDOW_S)))
