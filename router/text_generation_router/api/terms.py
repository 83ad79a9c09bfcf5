"""The headers of a request's deadline and priority: `X-Request-Timeout` and `X-Priority`."""

import asyncio
import math

from starlette.types import Scope

from text_generation_router.errors import ValidationError
from text_generation_router.terms import NO_TERMS, Deadline, Terms

# The key of a request's arrival in its scope, in the time of the event loop.
ARRIVAL = "text_generation_router.arrival"
_TERMS = "text_generation_router.terms"
_TIMEOUT, _PRIORITY = b"x-request-timeout", b"x-priority"
MOST_PRIORITY = 100
_SHOWN = 32


def read_terms(scope: Scope) -> Terms:
    """The terms of a request, noted for `terms_of`. Raises ValidationError."""
    found = [pair for pair in scope["headers"] if pair[0] == _TIMEOUT or pair[0] == _PRIORITY]
    most_s = scope["app"].state.config.request_timeout
    if not found and most_s is None:
        return NO_TERMS
    times = [value for name, value in found if name == _TIMEOUT]
    ranks = [value for name, value in found if name == _PRIORITY]
    is_timed = times or most_s is not None
    deadline = _deadline(scope, times, most_s) if is_timed else None
    scope[_TERMS] = terms = Terms(deadline, _priority(ranks) if ranks else None)
    return terms


def terms_of(scope: Scope) -> Terms:
    """The terms that `read_terms` found; none on routes that do not read them."""
    terms = scope.get(_TERMS, NO_TERMS)
    assert isinstance(terms, Terms)
    return terms


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
    try:
        [value] = sent
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _bad("X-Request-Timeout", "be one number of seconds > 0, such as 2.5", sent)
    return seconds


def _priority(sent: list[bytes]) -> int:
    try:
        [value] = sent
        priority = int(value)
    except ValueError:
        priority = MOST_PRIORITY + 1
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise _bad(
            "X-Priority", f"be one whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}", sent
        )
    return priority


def _bad(header: str, expected: str, sent: list[bytes]) -> ValidationError:
    given = b", ".join(sent).decode("latin-1")[:_SHOWN]
    return ValidationError(f"the header {header} must {expected}. Given: {given!r}")
