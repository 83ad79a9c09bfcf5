"""Languages as expressions: what may follow a symbol, and the shortest text.

What cannot be said exactly is described by more than there is, never by less; see `places`.

Symbols are characters, and the numbers of tokens that are no text.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import regex

Symbol = str | int
_Key = TypeVar("_Key")
_State = TypeVar("_State")
# What stands for a class of characters: the first of these that is in it.
_EXAMPLES = "0aA1-_.:/" + "".join(map(chr, range(33, 127))) + " \t\n\r"
# Where parts of Unicode begin; most classes have a character in the first.
_PARTS = (0x80, 0x1000, 0x10000, 0x20000, 0x110000)
# What may follow a symbol in a rule: more ways are not followed.
_MOST_WAYS = 1000
# States of one expression that are known at once.
_MOST_KNOWN = 20_000
# Parts in a row that need not be there and are passed over at once. What has more is followed as if
# the others had to be there.
MOST_SKIPPED = 30


class TooLargeError(ValueError):
    """What is too large to be described; a few words."""


class Expression(ABC):
    """A set of texts. Compared by identity; what `after` gives again is the same object."""

    _length: float | None = None

    @property
    def length(self) -> float:
        """Symbols of the shortest text; inf if there is none. 0: the empty text is one."""
        if self._length is None:
            self._length = self.measure()
        return self._length

    @abstractmethod
    def measure(self) -> float:
        """`length`, found out anew: only asked for itself until all references are settled."""

    def rank(self) -> int:
        """Above those of the references in a text of `length` symbols. Of choices of the same
        length that of the lowest rank is taken, so that no shortest text holds itself."""
        return 0

    @abstractmethod
    def after(self, symbol: Symbol) -> Iterable[tuple["Expression", ...]]:
        """What may follow once the first symbol is read: sequences of expressions."""

    @abstractmethod
    def shortest(self) -> list[Symbol]:
        """A text of `length` symbols."""

    @abstractmethod
    def firsts(self) -> Iterable[Symbol]:
        """Symbols to begin with: one, at least, for each way to go on."""


class Characters(Expression):
    """One character of a class."""

    def __init__(self, source: str, flags: str = "") -> None:
        """`source`: as the package `regex` writes a class. ValueError if it is none."""
        try:
            self._matches = _matcher(source, flags)
        except regex.error as error:
            raise ValueError(str(error)) from error
        self._source, self._flags = source, flags
        self._firsts: list[Symbol] = []

    def measure(self) -> float:
        return 1 if _example(self._source, self._flags) else math.inf

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        return ((),) if isinstance(symbol, str) and self._matches(symbol) else ()

    def shortest(self) -> list[Symbol]:
        return list(_example(self._source, self._flags))

    def firsts(self) -> Iterable[Symbol]:
        if not self._firsts:
            # Where classes of ranges meet, there is an end of one of the ranges.
            others = filter(self._matches, _EXAMPLES + self._source)
            self._firsts = list(dict.fromkeys([*self.shortest(), *others]))
        return self._firsts


@lru_cache(1024)
def _pattern(source: str, flags: str) -> "regex.Pattern[str]":
    options = regex.V1 | (regex.I if "i" in flags else 0) | (regex.S if "s" in flags else 0)
    return regex.compile(source, options)


@lru_cache(1024)
def _matcher(source: str, flags: str) -> Callable[[str], bool]:
    match = _pattern(source, flags).fullmatch
    return lru_cache(4096)(lambda character: match(character) is not None)


@lru_cache(1024)
def _example(source: str, flags: str) -> str:
    """A character of a class: one that is written in it, or any; empty if there is none."""
    if found := next(filter(_matcher(source, flags), _EXAMPLES + source), ""):
        return found
    for part in range(len(_PARTS) - 1):
        if elsewhere := _pattern(source, flags).search(_characters(part)):
            return str(elsewhere[0])
    return ""


@lru_cache
def _characters(part: int) -> str:
    """The characters of a part of Unicode."""
    codes = range(_PARTS[part], _PARTS[part + 1])
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def remembered(known: "dict[_Key, _State]", key: "_Key", make: "Callable[[], _State]") -> "_State":
    """The state of an expression behind what `key` says: the same one, as long as it is known."""
    if (found := known.get(key)) is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        found = known[key] = make()
    return found


class Tokens(Expression):
    """One of several tokens by their numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = dict.fromkeys(numbers)

    def measure(self) -> float:
        return 1 if self._numbers else math.inf

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        return ((),) if symbol in self._numbers else ()

    def shortest(self) -> list[Symbol]:
        return list(self.firsts())

    def firsts(self) -> Iterable[Symbol]:
        return [next(iter(self._numbers))] if self._numbers else []


class Text(Expression):
    """One text, of which what comes before a place is read."""

    def __init__(self, text: Sequence[Symbol], place: int = 0) -> None:
        self._text, self._place = text, place
        self._next: Text | None = None

    @property
    def text(self) -> str | None:
        """What is left of it; None if tokens by their numbers are in it."""
        return self._text[self._place :] if isinstance(self._text, str) else None

    def measure(self) -> float:
        return len(self._text) - self._place

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if self._place == len(self._text) or self._text[self._place] != symbol:
            return ()
        if self._place + 1 == len(self._text):
            return ((),)
        if self._next is None:
            self._next = Text(self._text, self._place + 1)
        return ((self._next,),)

    def shortest(self) -> list[Symbol]:
        return list(self._text[self._place :])

    def firsts(self) -> Iterable[Symbol]:
        return self._text[self._place : self._place + 1]


class Texts(Expression):
    """One of several texts: of those from `first` to `end` what comes before a place is read, which
    they have in common. However many they are, there is one way to go on."""

    def __init__(self, texts: Sequence[str], first: int, end: int, place: int = 0) -> None:
        """`texts` are in order."""
        self._texts, self._first, self._end, self._place = texts, first, end, place
        self._next: dict[Symbol, tuple[Expression, ...]] = {}

    def _nearest(self) -> str:
        return min(self._texts[self._first : self._end], key=len)

    def measure(self) -> float:
        return len(self._nearest()) - self._place

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not isinstance(symbol, str):
            return ()
        if symbol not in self._next:
            place = self._place
            bounds = self._texts, symbol, self._first, self._end
            first = bisect_left(*bounds, key=lambda text: text[place : place + 1])
            end = bisect_right(*bounds, key=lambda text: text[place : place + 1])
            if first == end:
                return ()
            self._next[symbol] = (Texts(self._texts, first, end, place + 1),)
        return (self._next[symbol],)

    def shortest(self) -> list[Symbol]:
        return list(self._nearest()[self._place :])

    def firsts(self) -> Iterable[Symbol]:
        texts = self._texts[self._first : self._end]
        return dict.fromkeys(text[self._place] for text in texts if len(text) > self._place)


class Sequence_(Expression):
    """One after another."""

    def __init__(self, parts: Sequence[Expression]) -> None:
        self.parts = tuple(parts)

    def measure(self) -> float:
        return sum(part.measure() for part in self.parts)

    def rank(self) -> int:
        return max((part.rank() for part in self.parts), default=0)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        for place, part in enumerate(self.parts[:MOST_SKIPPED]):
            for rest in part.after(symbol):
                yield (*rest, *self.parts[place + 1 :])
            if part.length:
                return

    def shortest(self) -> list[Symbol]:
        return [symbol for part in self.parts if part.length for symbol in part.shortest()]

    def firsts(self) -> Iterable[Symbol]:
        for part in self.parts:
            yield from part.firsts()
            if part.length:
                return


class Choice(Expression):
    """One of several."""

    def __init__(self, parts: Sequence[Expression]) -> None:
        self.parts = tuple(parts)

    def measure(self) -> float:
        return min((part.measure() for part in self.parts), default=math.inf)

    def rank(self) -> int:
        least = self.measure()
        return min((part.rank() for part in self.parts if part.measure() == least), default=0)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        for part in self.parts:
            yield from part.after(symbol)

    def shortest(self) -> list[Symbol]:
        parts = [part for part in self.parts if part.length == self.length]
        best = parts[0] if len(parts) == 1 else min(parts, key=lambda part: part.rank())
        return best.shortest()

    def firsts(self) -> Iterable[Symbol]:
        for part in self.parts:
            yield from part.firsts()


def one_of(parts: Sequence[Expression]) -> Expression:
    """One of the expressions; those that are texts are read together."""
    texts = [text for part in parts if isinstance(part, Text) and (text := part.text) is not None]
    if len(texts) < 2:
        return parts[0] if len(parts) == 1 else Choice(parts)
    others = [part for part in parts if not isinstance(part, Text) or part.text is None]
    known = sorted(set(texts))
    together = Texts(known, 0, len(known))
    return Choice([together, *others]) if others else together


class Repeat(Expression):
    """The same several times; `most` is inf if there is no limit."""

    def __init__(self, part: Expression, least: int = 0, most: float = math.inf) -> None:
        self.part, self.least, self.most = part, least, most
        self._next: Repeat | None = None

    def measure(self) -> float:
        return self.least * self.part.measure() if self.least else 0

    def rank(self) -> int:
        return self.part.rank() if self.least else 0

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not self.most:
            return
        if self._next is None:
            is_same = not self.least and self.most == math.inf
            next_ = Repeat(self.part, max(0, self.least - 1), self.most - 1)
            self._next = self if is_same else next_
        for rest in self.part.after(symbol):
            yield (*rest, self._next) if self._next.most else rest

    def shortest(self) -> list[Symbol]:
        return self.part.shortest() * self.least if self.least and self.part.length else []

    def firsts(self) -> Iterable[Symbol]:
        return self.part.firsts() if self.most else ()


class Reference(Expression):
    """An expression that is known later, and may hold this reference. `settle` gives lengths."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.target: Expression | None = None
        self.least, self.own_rank = math.inf, 0
        self._is_read = False
        # The last symbol that was read, and what may follow it: rules that hold one another several
        # times ask for the same as often as there are ways through them.
        self._last: tuple[Symbol, Sequence[tuple[Expression, ...]]] | None = None
        self._firsts: list[Symbol] | None = None

    def measure(self) -> float:
        return self.least

    def rank(self) -> int:
        return self.own_rank

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        # A rule that begins with itself is written without that; see `lark`.
        if self._last is not None and self._last[0] == symbol:
            return self._last[1]
        if self._is_read or self.target is None:
            return ()
        self._is_read = True
        try:
            # One after another, so that not more are made than are taken.
            ways = dict.fromkeys(islice(self.target.after(symbol), _MOST_WAYS))
        finally:
            self._is_read = False
        self._last = symbol, list(ways)
        return self._last[1]

    def shortest(self) -> list[Symbol]:
        assert self.target is not None
        return self.target.shortest() if self.least else []

    def firsts(self) -> Iterable[Symbol]:
        if self._firsts is not None:
            return self._firsts
        if self._is_read or self.target is None:
            return ()
        self._is_read = True
        try:
            self._firsts = list(dict.fromkeys(self.target.firsts()))
        finally:
            self._is_read = False
        return self._firsts


def settle(references: Sequence[Reference]) -> None:
    """Find the lengths of references that hold one another: the least ones there are."""
    has_changed = True
    while has_changed:
        has_changed = False
        for reference in references:
            assert reference.target is not None
            if (length := reference.target.measure()) < reference.least:
                reference.own_rank = reference.target.rank() + 1
                reference.least, has_changed = length, True
