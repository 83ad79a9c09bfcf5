"""Places in a text of an expression: what may follow, and the shortest rest.

A `Place` is what must still be written: an expression, then another place. After a symbol there is
a place for each way to read it (Antimirov's partial derivatives). Two texts are in the same state
if they have the same places. The distance to the end of a text is a sum. No automaton is built in
advance.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from text_generation_shard.grammars.language.expressions import (
    MOST_SKIPPED,
    Expression,
    Sequence_,
    Symbol,
    remembered,
)

_PRINTABLE = [chr(code) for code in range(32, 127)]
# Most places of one text.
_MOST_PLACES = 1000
# Most states in a search of an intersection: from its start, and after each symbol.
_MOST_STATES, _MOST_STATES_BEHIND = 3000, 300
# Most steps to read one symbol.
_MOST_STEPS = 50_000
# Most cached entries in all places of a grammar.
_MOST_REMEMBERED = 20_000


class _Remembered:
    """Owns the list of a root's places with cached entries; clears all caches at the limit."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}
        self._count = 0

    def note(self, place: "Place") -> None:
        """Count one more entry, which the place is about to cache."""
        if self._count >= _MOST_REMEMBERED:
            for other in self._places:
                other.forget()
            self._places.clear()
            self._count = 0
        self._places[place] = None
        self._count += 1


class Place:
    """What must still be written: an expression, then another place. Owns the places before it:
    equal places of one root are one object while they are cached."""

    __slots__ = ("_after", "_before", "_remembered", "expression", "length", "rest")

    def __init__(self, expression: Expression | None = None, rest: "Place | None" = None) -> None:
        """Without an expression: the end of the text."""
        self.expression, self.rest = expression, rest
        self.length: float = 0
        if expression is not None and rest is not None:
            self.length = expression.length + rest.length
        self._before: dict[Expression, Place] = {}
        self._after: dict[Symbol, list[Place]] = {}
        self._remembered: _Remembered = _Remembered() if rest is None else rest._remembered

    def forget(self) -> None:
        """Clear the caches."""
        self._before.clear()
        self._after.clear()

    def before(self, expressions: Sequence[Expression]) -> "Place":
        """The place with `expressions` in front of this one."""
        place, todo = self, list(expressions)
        while todo:
            expression = todo.pop()
            if isinstance(expression, Sequence_):
                todo += expression.parts
                continue
            found = place._before.get(expression)
            if found is None:
                place._remembered.note(place)
                found = place._before[expression] = Place(expression, place)
            place = found
        return place

    def after(self, symbol: Symbol, most: int) -> "tuple[list[Place], int]":
        """The places after one symbol, found in at most `most` steps, and the steps taken."""
        known = self._after.get(symbol)
        if known is not None:
            return known, 1 + len(known)
        steps = 1
        place: Place = self
        found: dict[Place, None] = {}
        for _ in range(MOST_SKIPPED):
            if place.expression is None or place.rest is None:
                break
            for rest in place.expression.after(symbol):
                steps += 1 + len(rest)
                if steps > most:
                    return [place for place in found if place.length < math.inf], steps
                found[place.rest.before(rest)] = None
            if place.expression.length:
                break
            place = place.rest
        places = [place for place in found if place.length < math.inf]
        self._remembered.note(self)
        self._after[symbol] = places
        return places, steps

    def after_text(self, text: str) -> "Place | None":
        """The only place after a text, if it needs no search; else None."""
        if self.expression is None or self.rest is None:
            return None
        is_last = self.rest.expression is None
        following = self.expression.after_text(text, is_last=is_last)
        return None if following is None else self.rest.before([following])

    def shortest(self) -> list[Symbol]:
        """The shortest rest of the text."""
        symbols: list[Symbol] = []
        place: Place = self
        while place.expression is not None and place.rest is not None:
            if place.expression.length:
                symbols += place.expression.shortest()
            place = place.rest
        return symbols

    def firsts(self) -> Iterable[Symbol]:
        """Symbols that may follow: at least one for each way to go on."""
        place: Place = self
        while place.expression is not None and place.rest is not None:
            yield from place.expression.firsts()
            if place.expression.length:
                return
            place = place.rest


Places = tuple[Place, ...]


def start(expression: Expression) -> Places:
    """The places at the start of a text; none if there is no text."""
    place = Place().before([expression])
    return (place,) if place.length < math.inf else ()


def after(places: Places, symbol: Symbol) -> Places:
    """The places after one more symbol; none if it can not follow."""
    if len(places) == 1:
        return _nearest(places[0].after(symbol, _MOST_STEPS)[0])
    all_found: dict[Place, None] = {}
    left = _MOST_STEPS
    for place in places:
        found, steps = place.after(symbol, left)
        all_found |= dict.fromkeys(found)
        left -= steps
        if left <= 0:
            break
    return _nearest(all_found)


def _nearest(places: Collection[Place]) -> Places:
    """At most _MOST_PLACES places: those nearest to their ends."""
    if len(places) > _MOST_PLACES:
        return tuple(sorted(places, key=lambda place: place.length)[:_MOST_PLACES])
    return tuple(places)


def after_text(places: Places, text: str) -> Places:
    """The places after all characters of a text."""
    if len(places) == 1 and len(text) > 1:
        following = places[0].after_text(text)
        if following is not None:
            return (following,)
    for character in text:
        places = after(places, character)
    return places


def distance(places: Places) -> float:
    """The least number of symbols that must follow; inf without places."""
    return min((place.length for place in places), default=math.inf)


class Both(Expression):
    """The intersection of several expressions. Its length is found by a search; a lower bound if
    the search reaches its limit."""

    def __init__(
        self, parts: Sequence[Places], known: "dict[tuple[Places, ...], Both] | None" = None
    ) -> None:
        self._parts = tuple(parts)
        self._most_states = _MOST_STATES if known is None else _MOST_STATES_BEHIND
        self._known = {self._parts: self} if known is None else known
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
        return remembered(self._known, parts, lambda: Both(parts, self._known))

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        found = self._next(symbol)
        return ((found,),) if found is not None else ()

    def _search(self) -> float:
        order = count()
        heap: list[tuple[float, int, Both]] = [(self._least, 0, self)]
        # Each state's distance, predecessor and symbol.
        came: dict[Both, tuple[int, Both, Symbol]] = {self: (0, self, "")}
        while heap and len(came) < self._most_states:
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
                # Of equal prices the newest is first: it is nearer to its end.
                heappush(heap, (steps + rest, -next(order), following))
        return max(self._least, 1)

    def _keep(self, end: "Both", came: "dict[Both, tuple[int, Both, Symbol]]") -> float:
        """Store the shortest text at all states on the way to `end`; returns the length from
        here."""
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
