"""JSON strings: texts of another expression with JSON's escapes."""

import json
import math
import re
from collections.abc import Iterable, Iterator

from text_generation_shard.grammars.language.expressions import (
    Expression,
    Sequence_,
    Symbol,
    Text,
    remembered,
)
from text_generation_shard.grammars.language.places import (
    Places,
    after,
    after_text,
    distance,
)

_LETTERS = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
# Characters that end a string, begin an escape, or are forbidden in a string.
_NOT_PLAIN = re.compile(r'["\\\x00-\x1f]')
# Most completions of an incomplete \u escape that are tried.
_MOST_CODES = 256


def quoted(text: str) -> str:
    """A JSON string as llguidance writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def string(inner: Places) -> Expression:
    """Strings whose value is a text of `inner`."""
    return Sequence_([Text('"'), Escaped(inner)])


class Escaped(Expression):
    """The rest of a string after the first quote. `pending`: the beginning of an escape."""

    def __init__(
        self,
        inner: Places,
        pending: str = "",
        known: "dict[tuple[Places, str], Escaped] | None" = None,
    ) -> None:
        self._inner, self._pending = inner, pending
        self._known = {(inner, pending): self} if known is None else known

    def measure(self) -> float:
        if not self._pending:
            return distance(self._inner) + 1
        ends = (len(rest) + distance(inner) + 1 for rest, inner in self._ends())
        return min(ends, default=math.inf)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not isinstance(symbol, str):
            return ()
        if self._pending or symbol == "\\":
            pending = self._pending + symbol
            if (value := _value(pending)) is not None:
                return self._next(after(self._inner, value), "")
            return self._next(self._inner, pending) if _is_beginning(pending) else ()
        if symbol == '"':
            return () if distance(self._inner) else ((),)
        return () if symbol < " " else self._next(after(self._inner, symbol), "")

    def after_text(self, text: str, *, is_last: bool) -> Expression | None:
        """See Expression."""
        if self._pending or _NOT_PLAIN.search(text):
            return None
        ways = self._next(after_text(self._inner, text), "")
        return next((way[0] for way in ways), None)

    def _next(self, inner: Places, pending: str) -> Iterable[tuple[Expression, ...]]:
        if not inner:
            return ()
        key = inner, pending
        return ((remembered(self._known, key, lambda: Escaped(*key, self._known)),),)

    def _ends(self) -> Iterator[tuple[str, Places]]:
        """Completions of an escape and the places after each, up to the first that is optimal."""
        if len(self._pending) == 1:
            options = iter(_LETTERS)
        else:
            missing = 6 - len(self._pending)
            options = (f"{code:0{missing}x}" for code in range(min(16**missing, _MOST_CODES)))
        least = distance(self._inner) - 1
        for rest in options:
            value = _value(self._pending + rest)
            if value is not None and (inner := after(self._inner, value)):
                yield rest, inner
                if distance(inner) <= max(least, 0):
                    return

    def shortest(self) -> list[Symbol]:
        rest, inner = "", self._inner
        if self._pending:
            rest, inner = min(self._ends(), key=lambda end: len(end[0]) + distance(end[1]))
        value = min(inner, key=lambda place: place.length).shortest()
        return list(rest + quoted("".join(map(str, value)))[1:])

    def firsts(self) -> Iterable[Symbol]:
        if self._pending:
            return [rest[0] for rest, _ in self._ends()]
        signs = dict.fromkeys(str(first) for place in self._inner for first in place.firsts())
        ends = () if distance(self._inner) else ('"',)
        return dict.fromkeys([*ends, *(quoted(sign)[1] for sign in signs)])


def _value(escape: str) -> str | None:
    """The character of a complete escape."""
    if len(escape) == 2:
        return _LETTERS.get(escape[1])
    return chr(int(escape[2:], 16)) if len(escape) == 6 else None


def _is_beginning(escape: str) -> bool:
    return escape in ("\\", "\\u") or (
        escape.startswith("\\u") and all(sign in "0123456789abcdefABCDEF" for sign in escape[2:])
    )
