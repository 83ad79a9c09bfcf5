"""What a request carries beside its parameters: its caller, with what each API key may use, its
trace, and its headers' options."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from starlette.types import Scope

from text_generation_router.errors import (
    DeadlineError,
    KeyLimitError,
    ValidationError,
)

_MINUTE_S = 60.0
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


# Event loops round the time of a timer to a thousandth.
_ROUNDED_S = 0.001


class Deadline:
    """When the answer to one request must have ended. Used from its event loop only.

    It ends the task that makes the answer, and `infer.time_limited` ends the entries, which a
    stream still reads after that task.
    """

    def __init__(self, seconds: float, source: str, arrival: float) -> None:
        """`arrival` is a time of the event loop; `source` names the header or flag that sets it."""
        self._seconds = seconds
        self._source = source
        self.at = arrival + seconds
        """Its time, of the event loop."""

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return asyncio.get_running_loop().time() >= self.at - _ROUNDED_S

    def error(self) -> DeadlineError:
        """The error for the client."""
        return DeadlineError(self._seconds, self._source)

    @asynccontextmanager
    async def bounds(self) -> AsyncIterator[None]:
        """Ends the block when the deadline passes. Raises DeadlineError."""
        timer = asyncio.timeout_at(self.at)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise self.error() from None


class Trace(Protocol):
    """The trace of a request; see `tracing.requests.RequestTrace`."""

    def follow(self, entries: Sequence[Any]) -> None:
        """These entries are its sequences."""

    def end(self, entry: Any, error_type: str) -> None:
        """A sequence has ended."""

    def fail(self, error_type: str) -> None:
        """The request has failed."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Who sends a request, what its headers ask for, and its trace."""

    caller: Caller = ANYBODY
    deadline: Deadline | None = None
    # Higher ones come first; None: not given.
    priority: int | None = None
    trace: Trace | None = None
    # Its permits are taken already: its generations need none, and log no success.
    is_admitted: bool = False


NO_OPTIONS = RequestOptions()


# Keys of a scope: when the request arrived, in the time of the event loop; its Caller; its
# RequestTrace, if it has one.
ARRIVAL, CALLER = "text_generation_router.arrival", "text_generation_router.caller"
TRACE = "text_generation_router.trace"
_OPTIONS = "text_generation_router.request_options"
_TIMEOUT, _PRIORITY = b"x-request-timeout", b"x-priority"
MOST_PRIORITY = 100
_SHOWN = 32


class RequestName(NamedTuple):
    """The fields of a request in log lines."""

    route: str
    request_id: str
    trace_id: str = ""


_CURRENT: ContextVar[RequestName | None] = ContextVar("request", default=None)


def become(name: RequestName) -> None:
    """This task serves this request from now on."""
    _CURRENT.set(name)


def current() -> RequestName | None:
    """The request that this task serves, if any."""
    return _CURRENT.get()


def request_fields() -> Mapping[str, str]:
    """What a log line of this task tells of its request."""
    request = current()
    if request is None:
        return {}
    return {name: value for name, value in request._asdict().items() if value}


def read_options(scope: Scope) -> RequestOptions:
    """The options of a request, noted for `options_of`. Raises ValidationError."""
    found = [pair for pair in scope["headers"] if pair[0] == _TIMEOUT or pair[0] == _PRIORITY]
    most_s = scope["app"].state.config.request_timeout
    caller, trace = scope.get(CALLER, ANYBODY), scope.get(TRACE)
    if caller is ANYBODY and trace is None and not found and most_s is None:
        return NO_OPTIONS
    times = [value for name, value in found if name == _TIMEOUT]
    ranks = [value for name, value in found if name == _PRIORITY]
    is_timed = times or most_s is not None
    scope[_OPTIONS] = request_options = RequestOptions(
        caller=caller,
        deadline=_deadline(scope, times, most_s) if is_timed else None,
        priority=_priority(ranks) if ranks else None,
        trace=trace,
    )
    return request_options


def options_of(scope: Scope) -> RequestOptions:
    """The options that `read_options` found; none on routes that do not read them."""
    request_options = scope.get(_OPTIONS, NO_OPTIONS)
    assert isinstance(request_options, RequestOptions)
    return request_options


def _deadline(scope: Scope, sent: list[bytes], most_s: float | None) -> Deadline:
    """The smaller of the limits of the request and of the server."""
    seconds, source = math.inf, ""
    if sent:
        seconds, source = _seconds(sent), "X-Request-Timeout"
    if most_s is not None and most_s <= seconds:
        seconds, source = most_s, "--request-timeout"
    arrival = scope.get(ARRIVAL) or asyncio.get_running_loop().time()
    return Deadline(seconds, source, arrival)


def _seconds(sent: list[bytes]) -> float:
    seconds = _number(sent)
    if not 0 < seconds < math.inf:
        raise _bad("X-Request-Timeout", "be one number of seconds > 0, such as 2.5", sent)
    return seconds


def _priority(sent: list[bytes]) -> int:
    priority = _number(sent)
    if not (abs(priority) <= MOST_PRIORITY and priority.is_integer()):
        raise _bad(
            "X-Priority", f"be one whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}", sent
        )
    return int(priority)


def _number(sent: list[bytes]) -> float:
    """NaN if there are several values, or the one is no number."""
    try:
        [value] = sent
        return float(value)
    except ValueError:
        return math.nan


def _bad(header: str, expected: str, sent: list[bytes]) -> ValidationError:
    given = b", ".join(sent).decode("latin-1")[:_SHOWN]
    return ValidationError(f"the header {header} must {expected}. Given: {given!r}")
