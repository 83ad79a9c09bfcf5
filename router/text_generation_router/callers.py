"""How much may run at once: of all callers together, and of each API key."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from text_generation_router.errors import KeyLimitError, OverloadedError, ValidationError

_MINUTE_S = 60.0
# Only the last endings count, and only within the window.
MAX_ENDINGS = 64
WINDOW_S = 60.0
# When the next of the key's requests ends is unknown.
_RETRY_PLACE_S = 1


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of each API key; None: no limit."""

    max_concurrent_requests: int | None = None
    max_tokens_per_minute: int | None = None


class Allowance:
    """Owns the running sequences and the token bucket of one API key; only `Infer` changes it.

    The bucket holds the tokens of one minute and refills at that rate. It admits a request while it
    is above zero. A prompt is charged when it starts, and each generated token when it is
    delivered, so the bucket can go below zero: then it admits nothing until it is above zero again.
    `now` is in seconds, of a monotonic clock.
    """

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits
        self.num_running = 0
        self._tokens = float(limits.max_tokens_per_minute or 0)
        # The time of `_tokens`.
        self._filled_at = -math.inf

    @property
    def num_free(self) -> int | None:
        """How many more sequences may start, at least one; None: no limit."""
        most = self._limits.max_concurrent_requests
        return None if most is None else max(1, most - self.num_running)

    def check_could_fit(self, num: int) -> None:
        """Raises ValidationError for more sequences than may ever run at once."""
        most = self._limits.max_concurrent_requests
        if most is not None and num > most:
            raise ValidationError(
                f"one request has {num} sequences; an API key may have at most {most} running "
                "(--max-concurrent-requests-per-key)"
            )

    def enter(self, num: int, now: float) -> None:
        """Counts `num` sequences as running. Raises KeyLimitError, and see `check_could_fit`."""
        self.check_could_fit(num)
        most = self._limits.max_concurrent_requests
        if most is not None and self.num_running + num > most:
            raise KeyLimitError(
                f"This API key has {self.num_running} of at most {most} sequences running "
                "(--max-concurrent-requests-per-key); try again when one has ended",
                "requests",
                _RETRY_PLACE_S,
            )
        if (wait_s := self._wait_s(now)) > 0:
            raise KeyLimitError(
                f"This API key has used its {self._limits.max_tokens_per_minute} tokens a minute "
                f"(--max-tokens-per-minute-per-key); try again in {wait_s} s",
                "tokens",
                wait_s,
            )
        self.num_running += num

    def leave(self, num: int) -> None:
        """Counts `num` sequences as ended."""
        self.num_running -= num
        assert self.num_running >= 0, "more left than came"

    def take(self, num_tokens: int, now: float) -> None:
        """Charges used tokens."""
        if self._limits.max_tokens_per_minute is not None:
            self._tokens = self._tokens_at(now) - num_tokens
            self._filled_at = now

    def _tokens_at(self, now: float) -> float:
        most = float(self._limits.max_tokens_per_minute or 0)
        return min(most, self._tokens + (now - self._filled_at) * most / _MINUTE_S)

    def _wait_s(self, now: float) -> int:
        """Whole seconds until the bucket is above zero; 0: it is."""
        most = self._limits.max_tokens_per_minute
        if most is None or (tokens := self._tokens_at(now)) > 0:
            return 0
        return math.floor(-tokens * _MINUTE_S / most) + 1


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request. Requests with different salts share no cached prefix."""

    salt: str = ""
    allowance: Allowance | None = None


# All requests of a server without keys, or with one key and no limits.
ANYBODY = Caller()


class EndingRate:
    """How fast requests end: the source of `retry-after`. Owns the times of the last endings, in
    seconds of one monotonic clock.

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
