"""The formats of JSON schemas, checked by Python's own parsers."""

import ipaddress
import re
import uuid
from collections.abc import Callable
from datetime import datetime

from jsonschema import FormatChecker


def _of_text(check: Callable[[str], bool]) -> Callable[[object], bool]:
    """A format says nothing about values that are no strings."""
    return lambda value: not isinstance(value, str) or check(value)


FORMATS = FormatChecker(formats=())
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_FULL = {
    "duration": r"P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)(?<!P)(?<!T)",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": r"[^@\s]+@[^@\s]+",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s\"<>]*",
}
for _name, _pattern in _FULL.items():
    FORMATS.checks(_name)(
        _of_text(lambda it, pattern=_pattern: re.fullmatch(pattern, it, re.ASCII) is not None)  # type: ignore[misc]
    )


def _moment(value: str) -> bool:
    """Python supports neither the year 0 nor leap seconds, and at most six decimals."""
    plain = re.sub(r"\.(\d{1,6})\d*", lambda found: "." + found[1].ljust(6, "0"), value[4:])
    return bool(datetime.fromisoformat("2000" + plain.replace(":60", ":59").upper()))


FORMATS.checks("ipv4", ValueError)(_of_text(lambda it: bool(ipaddress.IPv4Address(it)) or True))
FORMATS.checks("ipv6", ValueError)(_of_text(lambda it: bool(ipaddress.IPv6Address(it)) or True))
FORMATS.checks("uuid", ValueError)(_of_text(lambda value: bool(uuid.UUID(value)) or True))
FORMATS.checks("date", ValueError)(_of_text(lambda value: len(value) == 10 and _moment(value)))
FORMATS.checks("time", ValueError)(_of_text(lambda value: _moment("2000-01-01T" + value)))
FORMATS.checks("date-time", ValueError)(_of_text(lambda it: len(it) > 19 and _moment(it)))
