"""What the formats of JSON schemas mean, checked by Python's own readers."""

import ipaddress
import re
import uuid
from datetime import datetime

from jsonschema import FormatChecker

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
        lambda value, pattern=_pattern: re.fullmatch(pattern, value, re.ASCII) is not None
    )
FORMATS.checks("ipv4", ValueError)(lambda value: bool(ipaddress.IPv4Address(value)) or True)
FORMATS.checks("ipv6", ValueError)(lambda value: bool(ipaddress.IPv6Address(value)) or True)
FORMATS.checks("uuid", ValueError)(lambda value: bool(uuid.UUID(value)) or True)


def _moment(value: str) -> bool:
    """Python knows neither the year 0 nor leap seconds, and no more than six decimals."""
    plain = re.sub(r"\.(\d{1,6})\d*", lambda found: "." + found[1].ljust(6, "0"), value[4:])
    return bool(datetime.fromisoformat("2000" + plain.replace(":60", ":59").upper()))


FORMATS.checks("date", ValueError)(lambda value: len(value) == 10 and _moment(value))
FORMATS.checks("time", ValueError)(lambda value: _moment("2000-01-01T" + value))
FORMATS.checks("date-time", ValueError)(lambda value: len(value) > 19 and _moment(value))
