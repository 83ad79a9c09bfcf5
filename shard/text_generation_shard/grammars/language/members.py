"""The members of a JSON object in order, without the braces."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from text_generation_shard.grammars.language.expressions import Expression, Symbol


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The members of an object. Owns the expressions of its rests, by place and `is_first`."""

    # Each with whether it is required.
    named: Sequence[tuple[bool, Expression]]
    comma: Expression
    # What may follow the named ones: as the first member, and after another member.
    first: Expression
    more: Expression
    rests: "dict[tuple[int, bool], Members]" = field(default_factory=dict)


class Members(Expression):
    """The members from a place on. `is_first`: no member was written yet."""

    def __init__(self, pairs: Pairs, place: int = 0, *, is_first: bool = True) -> None:
        self._pairs, self._place, self._is_first = pairs, place, is_first

    def _ways(self) -> Iterator[tuple[tuple[Expression, ...], Expression | None]]:
        """The possible next parts, and the members after them."""
        pairs = self._pairs
        for place in range(self._place, len(pairs.named)):
            is_required, pair = pairs.named[place]
            yield ((pair,) if self._is_first else (pairs.comma, pair)), self._rest(place + 1)
            if is_required:
                return
        yield ((pairs.first if self._is_first else pairs.more),), None

    def _rest(self, place: int) -> Expression:
        key = place, False
        if key not in self._pairs.rests:
            self._pairs.rests[key] = Members(self._pairs, place, is_first=False)
        return self._pairs.rests[key]

    def _required(self) -> list[Expression]:
        own = [pair for is_required, pair in self._pairs.named[self._place :] if is_required]
        parts = [part for pair in own for part in (self._pairs.comma, pair)]
        return parts[1:] if self._is_first else parts

    def _shortest_way(self) -> list[Expression]:
        """The required members alone; without any, the shortest allowed first member.

        An optional named member can be shorter than a required unnamed one.
        """
        pairs, required = self._pairs, self._required()
        if required or not self._is_first:
            return [*required, pairs.more]
        ways: list[list[Expression]] = [[pairs.first]]
        if pairs.first.measure():
            named = pairs.named[self._place :]
            ways += [[pair, pairs.more] for _, pair in named]
        return min(ways, key=lambda way: sum(part.measure() for part in way))

    def measure(self) -> float:
        return sum(part.measure() for part in self._shortest_way())

    def shortest(self) -> list[Symbol]:
        way = self._shortest_way()
        return [symbol for part in way if part.length for symbol in part.shortest()]

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        for way, rest in self._ways():
            follows = () if rest is None else (rest,)
            for place, part in enumerate(way):
                for found in part.after(symbol):
                    yield (*found, *way[place + 1 :], *follows)
                if part.length:
                    break

    def firsts(self) -> Iterable[Symbol]:
        for way, _ in self._ways():
            yield from way[0].firsts()
