"""Strings of JSON: texts of another language with what JSON writes for some characters."""

import json
import math
from collections.abc import Iterable, Iterator

from text_generation_shard.grammars.language.expressions import (
    Expression,
    Sequence_,
    Symbol,
    Text,
    remembered,
)
from text_generation_shard.grammars.language.places import Places, after, distance

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
# Characters of a code that are tried where its last digits are missing.
_MOST_CODES = 256


def quoted(text: str) -> str:
    """A string of JSON as llguidance writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def string(inner: Places) -> Expression:
    """Strings whose value is a text of `inner`."""
    return Sequence_([Text('"'), Escaped(inner), Text('"')])


class Escaped(Expression):
    """What is between the quotes: the places of the value, and the beginning of an escape."""

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
            return distance(self._inner)
        return min((len(rest) + distance(inner) for rest, inner in self._ends()), default=math.inf)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not isinstance(symbol, str):
            return ()
        if self._pending or symbol == "\\":
            pending = self._pending + symbol
            if (value := _value(pending)) is not None:
                return self._next(after(self._inner, value), "")
            return self._next(self._inner, pending) if _is_beginning(pending) else ()
        if symbol == '"' or symbol < " ":
            return ()
        return self._next(after(self._inner, symbol), "")

    def _next(self, inner: Places, pending: str) -> Iterable[tuple[Expression, ...]]:
        if not inner:
            return ()
        key = inner, pending
        return ((remembered(self._known, key, lambda: Escaped(*key, self._known)),),)

    def _ends(self) -> Iterator[tuple[str, Places]]:
        """Ways to end an escape with the places behind it, up to the first that is as good as any
        or all of them."""
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
        return list(rest + quoted("".join(map(str, value)))[1:-1])

    def firsts(self) -> Iterable[Symbol]:
        if self._pending:
            return [rest[0] for rest, _ in self._ends()]
        signs = dict.fromkeys(str(first) for place in self._inner for first in place.firsts())
        return dict.fromkeys(quoted(sign)[1] for sign in signs)


def _value(escape: str) -> str | None:
    """What a whole escape stands for."""
    if len(escape) == 2:
        return _LETTERS.get(escape[1])
    return chr(int(escape[2:], 16)) if len(escape) == 6 else None


def _is_beginning(escape: str) -> bool:
    return escape in ("\\", "\\u") or (
        escape.startswith("\\u") and all(sign in "0123456789abcdefABCDEF" for sign in escape[2:])
    )
