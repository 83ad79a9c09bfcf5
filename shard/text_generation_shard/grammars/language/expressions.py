"""Grammars as expressions: what may follow a symbol, and the shortest text.

An expression has all texts of its grammar, and may have more; see `places`.

Symbols are characters, and the ids of special tokens.
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
# The example of a character class is the first of these that is in it.
_EXAMPLES = "0aA1-_.:/" + "".join(map(chr, range(33, 127))) + " \t\n\r"
# Ranges of Unicode; most classes have a character in the first.
_PARTS = (0x80, 0x1000, 0x10000, 0x20000, 0x110000)
# Most ways to go on after a symbol of a rule; others are ignored.
_MOST_WAYS = 1000
# Most cached states of one expression.
_MOST_KNOWN = 20_000
# Most consecutive optional parts that are skipped; further ones count as required.
MOST_SKIPPED = 30


class TooLargeError(ValueError):
    """Part of a grammar is too large for an expression; the message names it."""


class Expression(ABC):
    """A set of texts. Compared by identity: `after` returns the same object for equal states."""

    _length: float | None = None

    @property
    def length(self) -> float:
        """Symbols of the shortest text; inf if there is none. 0: the empty text is one."""
        if self._length is None:
            self._length = self.measure()
        return self._length

    @abstractmethod
    def measure(self) -> float:
        """Compute `length`; called directly only until all references are settled."""

    def rank(self) -> int:
        """Greater than the ranks of the references in a text of `length` symbols. Of choices of
        equal length the lowest rank is taken, so that no shortest text contains itself."""
        return 0

    @abstractmethod
    def after(self, symbol: Symbol) -> Iterable[tuple["Expression", ...]]:
        """What may follow after the first symbol: sequences of expressions."""

    def after_text(self, text: str, *, is_last: bool) -> "Expression | None":
        """What follows after all characters of a text, if that is one expression that needs no
        search; else None. `is_last`: nothing follows this expression."""
        return None

    @abstractmethod
    def shortest(self) -> list[Symbol]:
        """A text of `length` symbols."""

    @abstractmethod
    def firsts(self) -> Iterable[Symbol]:
        """First symbols: at least one for each way to go on."""


class Characters(Expression):
    """One character of a class."""

    def __init__(self, source: str, flags: str = "") -> None:
        """`source`: a class in the syntax of the package `regex`. ValueError if it is invalid."""
        try:
            self._matches = _matcher(source, flags)
        except regex.error as error:
            raise ValueError(str(error)) from error
        self._source, self._flags = source, flags
        self._firsts: list[Symbol] = []

    def has_all(self, text: str) -> bool:
        """Whether all characters of a text are in the class."""
        return all(map(self._matches, text))

    def measure(self) -> float:
        return 1 if _example(self._source, self._flags) else math.inf

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        return ((),) if isinstance(symbol, str) and self._matches(symbol) else ()

    def shortest(self) -> list[Symbol]:
        return list(_example(self._source, self._flags))

    def firsts(self) -> Iterable[Symbol]:
        if not self._firsts:
            # If ranges of two classes overlap, the overlap contains an end of one of them.
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
    """A character of a class, preferably one written in its source; empty: the class is empty."""
    if found := next(filter(_matcher(source, flags), _EXAMPLES + source), ""):
        return found
    for part in range(len(_PARTS) - 1):
        if elsewhere := _pattern(source, flags).search(_characters(part)):
            return str(elsewhere[0])
    return ""


@lru_cache
def _characters(part: int) -> str:
    """The characters of a range of Unicode, without surrogates."""
    codes = range(_PARTS[part], _PARTS[part + 1])
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def remembered(known: "dict[_Key, _State]", key: "_Key", make: "Callable[[], _State]") -> "_State":
    """The cached state of an expression for `key`, or a new one."""
    if (found := known.get(key)) is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        found = known[key] = make()
    return found


class Tokens(Expression):
    """One of several tokens, by id."""

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
    """One text from a place on."""

    def __init__(self, text: Sequence[Symbol], place: int = 0) -> None:
        self._text, self._place = text, place
        self._next: Text | None = None

    @property
    def text(self) -> str | None:
        """The rest of the text; None if it contains token ids."""
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
    """One of the texts [first, end), which are equal before `place`. There is one way to go on,
    however many texts there are."""

    def __init__(self, texts: Sequence[str], first: int, end: int, place: int = 0) -> None:
        """`texts` are sorted."""
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
    """Expressions one after another."""

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
    """One of several expressions."""

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
    """One of the expressions; texts are combined."""
    texts = [text for part in parts if isinstance(part, Text) and (text := part.text) is not None]
    if len(texts) < 2:
        return parts[0] if len(parts) == 1 else Choice(parts)
    others = [part for part in parts if not isinstance(part, Text) or part.text is None]
    known = sorted(set(texts))
    together = Texts(known, 0, len(known))
    return Choice([together, *others]) if others else together


class Repeat(Expression):
    """An expression repeated `least` to `most` times; `most` can be inf."""

    def __init__(
        self,
        part: Expression,
        least: int = 0,
        most: float = math.inf,
        known: "dict[tuple[int, float], Repeat] | None" = None,
    ) -> None:
        self.part, self.least, self.most = part, least, most
        self._known = {(least, most): self} if known is None else known

    def measure(self) -> float:
        return self.least * self.part.measure() if self.least else 0

    def rank(self) -> int:
        return self.part.rank() if self.least else 0

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not self.most:
            return
        following = self._behind(1)
        for rest in self.part.after(symbol):
            yield (*rest, following) if following.most else rest

    def after_text(self, text: str, *, is_last: bool) -> Expression | None:
        """See Expression."""
        count = len(text)
        is_only = is_last or self.least >= count
        if not is_only or self.most <= count or not isinstance(self.part, Characters):
            return None
        return self._behind(count) if self.part.has_all(text) else None

    def _behind(self, count: int) -> "Repeat":
        """The repeats left after `count` parts."""
        key = max(0, self.least - count), self.most - count
        if key == (self.least, self.most):
            return self
        return remembered(self._known, key, lambda: Repeat(self.part, *key, self._known))

    def shortest(self) -> list[Symbol]:
        return self.part.shortest() * self.least if self.least and self.part.length else []

    def firsts(self) -> Iterable[Symbol]:
        return self.part.firsts() if self.most else ()


class Reference(Expression):
    """An expression that is set later, and may contain this reference. `settle` sets lengths."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.target: Expression | None = None
        self.least, self.own_rank = math.inf, 0
        self._is_read = False
        # A cache for the last symbol: rules that contain each other several times look up the same
        # symbol once for each way through them.
        self._last: tuple[Symbol, Sequence[tuple[Expression, ...]]] | None = None
        self._firsts: list[Symbol] | None = None

    def measure(self) -> float:
        return self.least

    def rank(self) -> int:
        return self.own_rank

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        # Left recursion was removed; see `lark`.
        if self._last is not None and self._last[0] == symbol:
            return self._last[1]
        if self._is_read or self.target is None:
            return ()
        self._is_read = True
        try:
            # A generator: only the ways that are taken are built.
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
    """Compute the lengths of references that contain each other: the least fixed point."""
    has_changed = True
    while has_changed:
        has_changed = False
        for reference in references:
            assert reference.target is not None
            if (length := reference.target.measure()) < reference.least:
                reference.own_rank = reference.target.rank() + 1
                reference.least, has_changed = length, True
