"""Parsers of flag values. Each returns the canonical spelling; its ValueError names what was
expected."""

import ipaddress
import sys
from collections.abc import Callable


def text(value: str) -> str:
    """Any text that is not empty."""
    if not value:
        raise ValueError("a value that isn't empty")
    return value


def true_or_false(value: str) -> str:
    """`true` or `false`; also from `1` or `0`."""
    canonical = {"true": "true", "1": "true", "false": "false", "0": "false"}.get(value.lower())
    if canonical is None:
        raise ValueError("true or false")
    return canonical


def choice(*names: str) -> Callable[[str], str]:
    """One of the names, as spelled here."""

    def parse(value: str) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return parse


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], str]:
    """A whole number between two limits, both allowed."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: str) -> str:
        is_plain = value.isascii() and value.isdigit() and len(value) < 19
        number = int(value) if is_plain else -1
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"a whole number {limits}")
        return str(number)

    return parse


PORT = whole(1, 65535)


def sizes(value: str) -> str:
    """Whole numbers from 1 to 1024 with commas between; or 0 alone, for none."""
    each = whole(1, 1024)
    try:
        return value if value == "0" else ",".join(each(item.strip()) for item in value.split(","))
    except ValueError as error:
        raise ValueError("whole numbers from 1 to 1024 with commas between, or 0") from error


def number(above: float, maximum: float = sys.float_info.max) -> Callable[[str], str]:
    """A finite number that is larger than `above` and at most `maximum`."""
    limit = "" if maximum == sys.float_info.max else f" and at most {maximum:g}"

    def parse(value: str) -> str:
        try:
            is_inside = above < float(value) <= maximum
        except ValueError:
            is_inside = False
        if not is_inside:
            raise ValueError(f"a number above {above:g}{limit}")
        return value

    return parse


def not_negative(value: str) -> str:
    """A finite number, 0 or more."""
    try:
        is_inside = 0 <= float(value) <= sys.float_info.max
    except ValueError:
        is_inside = False
    if not is_inside:
        raise ValueError("a number of 0 or more")
    return value


def path(value: str) -> str:
    """The path of a route."""
    if not value.startswith("/"):
        raise ValueError("a path that starts with /")
    return value


def is_address(value: str) -> bool:
    """Whether HOSTNAME is an address: containers set it to their own name."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return value == "localhost"
    return True


def always(value: str) -> bool:
    """For variables whose values always count."""
    return True
