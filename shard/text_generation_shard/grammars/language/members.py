"""The members of a JSON object in their order, without the brackets."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from text_generation_shard.grammars.language.expressions import Expression, Symbol


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """What an object may have. Owns the expressions of its rests, by place and what was before."""

    # Each with whether it must be there.
    named: Sequence[tuple[bool, Expression]]
    comma: Expression
    # What may follow the named ones: where nothing was written yet, and behind something.
    first: Expression
    more: Expression
    rests: "dict[tuple[int, bool], Members]" = field(default_factory=dict)


class Members(Expression):
    """The members from a place on."""

    def __init__(self, pairs: Pairs, place: int = 0, *, is_first: bool = True) -> None:
        self._pairs, self._place, self._is_first = pairs, place, is_first

    def _ways(self) -> Iterator[tuple[tuple[Expression, ...], Expression | None]]:
        """What may come next, and what then follows."""
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
        """With the required ones alone, or if nothing else is allowed to be first, with one more.

        A named one may be a shorter beginning than another one that must follow.
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
