"""Languages as expressions, and places in a text of them: what may follow, and the shortest of it.

A `Place` is what must still be written: an expression, then the place behind it. After a character
there is a place for each way to read it (Antimirov's partial derivatives). So two texts are in the
same state exactly if they have the same places, and the distance to the end of the text is a sum:
no automaton has to be made before, and a repetition that overlaps what follows it is one place
more. What cannot be said exactly is described by more than there is, never by less.

Symbols are characters, and the numbers of tokens that are no text.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count

import regex

Symbol = str | int
# What stands for a class of characters: the first of these that is in it.
_EXAMPLES = "0aA1-_.:/" + "".join(map(chr, range(33, 127))) + " \t\n\r"
# Where parts of Unicode begin; most classes have a character in the first.
_PARTS = (0x80, 0x1000, 0x10000, 0x20000, 0x110000)
_PRINTABLE = [chr(code) for code in range(32, 127)]
# Places of one text, and states of an intersection that are looked at, at most.
_MOST_PLACES, _MOST_STATES = 5000, 3000
# Parts in a row that need not be there and are passed over at once. What has more is followed as if
# the others had to be there.
_MOST_SKIPPED = 30


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


class Text(Expression):
    """One text."""

    def __init__(self, text: Sequence[Symbol]) -> None:
        self._text = text
        self._next: Text | None = None

    def measure(self) -> float:
        return len(self._text)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not self._text or self._text[0] != symbol:
            return ()
        if len(self._text) == 1:
            return ((),)
        if self._next is None:
            self._next = Text(self._text[1:])
        return ((self._next,),)

    def shortest(self) -> list[Symbol]:
        return list(self._text)

    def firsts(self) -> Iterable[Symbol]:
        return self._text[:1]


class Sequence_(Expression):
    """One after another."""

    def __init__(self, parts: Sequence[Expression]) -> None:
        self.parts = tuple(parts)

    def measure(self) -> float:
        return sum(part.measure() for part in self.parts)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        for place, part in enumerate(self.parts[:_MOST_SKIPPED]):
            for rest in part.after(symbol):
                yield (*rest, *self.parts[place + 1 :])
            if part.length:
                return

    def shortest(self) -> list[Symbol]:
        return [symbol for part in self.parts for symbol in part.shortest()]

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

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        for part in self.parts:
            yield from part.after(symbol)

    def shortest(self) -> list[Symbol]:
        return min(self.parts, key=lambda part: part.length).shortest()

    def firsts(self) -> Iterable[Symbol]:
        for part in self.parts:
            yield from part.firsts()


class Repeat(Expression):
    """The same several times; `most` is inf if there is no limit."""

    def __init__(self, part: Expression, least: int = 0, most: float = math.inf) -> None:
        self.part, self.least, self.most = part, least, most
        self._next: Repeat | None = None

    def measure(self) -> float:
        return self.least * self.part.measure() if self.least else 0

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
        return self.part.shortest() * self.least if self.least else []

    def firsts(self) -> Iterable[Symbol]:
        return self.part.firsts() if self.most else ()


class Reference(Expression):
    """An expression that is known later, and may hold this reference. `settle` gives lengths."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.target: Expression | None = None
        self.least = math.inf
        self._is_read = False

    def measure(self) -> float:
        return self.least

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        # A rule that begins with itself is written without that; see `lark`.
        if self._is_read or self.target is None:
            return
        self._is_read = True
        try:
            found = list(self.target.after(symbol))
        finally:
            self._is_read = False
        yield from found

    def shortest(self) -> list[Symbol]:
        assert self.target is not None
        return self.target.shortest()

    def firsts(self) -> Iterable[Symbol]:
        if self._is_read or self.target is None:
            return []
        self._is_read = True
        try:
            return list(self.target.firsts())
        finally:
            self._is_read = False


def settle(references: Sequence[Reference]) -> None:
    """Find the lengths of references that hold one another: the least ones there are."""
    has_changed = True
    while has_changed:
        has_changed = False
        for reference in references:
            assert reference.target is not None
            if (length := reference.target.measure()) < reference.least:
                reference.least, has_changed = length, True


class Place:
    """What must still be written. Owns the places that lie before it: those of one root that have
    the same to write are one object."""

    __slots__ = ("_after", "_before", "expression", "length", "rest")

    def __init__(self, expression: Expression | None = None, rest: "Place | None" = None) -> None:
        """Without an expression: nothing need follow."""
        self.expression, self.rest = expression, rest
        self.length: float = 0
        if expression is not None and rest is not None:
            self.length = expression.length + rest.length
        self._before: dict[Expression, Place] = {}
        self._after: dict[Symbol, list[Place]] = {}

    def before(self, expressions: Sequence[Expression]) -> "Place":
        """The place where `expressions` stand before this one."""
        place, todo = self, list(expressions)
        while todo:
            expression = todo.pop()
            if isinstance(expression, Sequence_):
                todo += expression.parts
                continue
            if expression not in place._before:
                place._before[expression] = Place(expression, place)
            place = place._before[expression]
        return place

    def after(self, symbol: Symbol) -> "list[Place]":
        """The places behind one symbol."""
        if symbol not in self._after:
            place: Place = self
            found: dict[Place, None] = {}
            for _ in range(_MOST_SKIPPED):
                if place.expression is None or place.rest is None:
                    break
                for rest in place.expression.after(symbol):
                    found[place.rest.before(rest)] = None
                if place.expression.length:
                    break
                place = place.rest
            self._after[symbol] = [place for place in found if place.length < math.inf]
        return self._after[symbol]

    def shortest(self) -> list[Symbol]:
        """The shortest text that ends here."""
        symbols: list[Symbol] = []
        place: Place = self
        while place.expression is not None and place.rest is not None:
            symbols += place.expression.shortest()
            place = place.rest
        return symbols

    def firsts(self) -> Iterable[Symbol]:
        """Symbols to go on with."""
        place: Place = self
        while place.expression is not None and place.rest is not None:
            yield from place.expression.firsts()
            if place.expression.length:
                return
            place = place.rest


Places = tuple[Place, ...]


def start(expression: Expression) -> Places:
    """Where a text begins."""
    place = Place().before([expression])
    return (place,) if place.length < math.inf else ()


def after(places: Places, symbol: Symbol) -> Places:
    """The places of a text behind one symbol more; none if it does not follow."""
    all_found = dict.fromkeys(new for place in places for new in place.after(symbol))
    # What is followed is less than there is, then.
    if len(all_found) > _MOST_PLACES:
        return tuple(sorted(all_found, key=lambda place: place.length)[:_MOST_PLACES])
    return tuple(all_found)


def distance(places: Places) -> float:
    """Symbols that must follow at least."""
    return min((place.length for place in places), default=math.inf)


class Both(Expression):
    """Texts that several expressions have in common. Its length is found by a search; where that
    has a limit, it is the least it could be."""

    def __init__(
        self, parts: Sequence[Places], known: "dict[tuple[Places, ...], Both] | None" = None
    ) -> None:
        self._parts = tuple(parts)
        self._known = {} if known is None else known
        self._known[self._parts] = self
        self._least = max((distance(part) for part in self._parts), default=0)
        self._found: list[Symbol] | None = None

    def measure(self) -> float:
        if self._length is None:
            self._length = self._search()
        return self._length

    def _next(self, symbol: Symbol) -> "Both | None":
        parts = tuple(after(part, symbol) for part in self._parts)
        if not all(parts):
            return None
        return self._known.get(parts) or Both(parts, self._known)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        found = self._next(symbol)
        return ((found,),) if found is not None else ()

    def _search(self) -> float:
        order = count()
        heap: list[tuple[float, int, Both]] = [(self._least, 0, self)]
        # How far each state is, and from where and with what it was come to.
        came: dict[Both, tuple[int, Both, Symbol]] = {self: (0, self, "")}
        while heap and len(came) < _MOST_STATES:
            _, _, state = heappop(heap)
            if not state._least or state._found is not None:
                return self._keep(state, came)
            for symbol in state.firsts():
                following = state._next(symbol)
                if following is None or following in came or following._least == math.inf:
                    continue
                steps = came[state][0] + 1
                came[following] = steps, state, symbol
                rest = following._least if following._found is None else len(following._found)
                # Among equals the one that is nearer to its end.
                heappush(heap, (steps + rest, -next(order), following))
        return max(self._least, 1)

    def _keep(self, end: "Both", came: "dict[Both, tuple[int, Both, Symbol]]") -> float:
        """Remember what was found at all states that lead to `end`; the length from here."""
        rest, state = end._found or [], end
        while state is not self:
            _, before, symbol = came[state]
            rest, state = [symbol, *rest], before
            state._found, state._length = rest, len(rest)
        self._found = rest
        return len(rest)

    def shortest(self) -> list[Symbol]:
        if self.length and self._found is None:
            longest = max(self._parts, key=distance)
            return min(longest, key=lambda place: place.length).shortest()
        return self._found or []

    def firsts(self) -> Iterable[Symbol]:
        own = [first for part in self._parts for place in part for first in place.firsts()]
        return dict.fromkeys([*own, *_PRINTABLE])
