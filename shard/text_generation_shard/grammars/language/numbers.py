"""JSON numbers within bounds. The shortest rest of a number is found by arithmetic."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from text_generation_shard.grammars.language.expressions import Expression, Symbol, remembered

# Most digits before and after the point.
_MOST_DIGITS, _MOST_DECIMALS = 24, 24
_BEGINNING = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?)?")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed numbers. Bounds are inclusive unless open; `multiple` 0: no restriction."""

    is_integer: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    low_is_open: bool = False
    high_is_open: bool = False
    multiple: Fraction = Fraction(0)

    def smallest(self, first: int, last: int, decimals: int, is_negative: bool) -> int | None:
        """The number nearest to 0 within the bounds and [first, last], in units of
        10 ** -decimals, without sign.
        """
        scale = 10**decimals
        low, high, opens = self.low, self.high, (self.low_is_open, self.high_is_open)
        if is_negative:
            low, high = (None if end is None else -end for end in (self.high, self.low))
            opens = self.high_is_open, self.low_is_open
            # -0 is not allowed.
            first = max(first, 1)
        if low is not None:
            least = math.ceil(low * scale)
            first = max(first, least + (opens[0] and least == low * scale))
        if high is not None:
            most = math.floor(high * scale)
            last = min(last, most - (opens[1] and most == high * scale))
        if self.multiple:
            step = (self.multiple * scale).numerator
            first = -(-first // step) * step
        return first if first <= last else None


class Number(Expression):
    """The rest of a number after its written characters."""

    def __init__(
        self, bounds: Bounds, written: str = "", known: "dict[str, Number] | None" = None
    ) -> None:
        self._bounds, self._written = bounds, written
        self._known = {written: self} if known is None else known
        self._rest: str | None = None
        self._is_searched = False

    def measure(self) -> float:
        rest = self._find()
        return math.inf if rest is None else len(rest)

    def after(self, symbol: Symbol) -> Iterable[tuple[Expression, ...]]:
        if not isinstance(symbol, str) or symbol not in "0123456789-.":
            return ()
        written = self._written + symbol
        found = remembered(self._known, written, lambda: Number(self._bounds, written, self._known))
        return ((found,),) if found.length < math.inf else ()

    def shortest(self) -> list[Symbol]:
        return list(self._find() or "")

    def firsts(self) -> Iterable[Symbol]:
        rest = self._find()
        # An intersection may require any digit.
        return dict.fromkeys([*(rest or "")[:1], *"0123456789-."])

    def _find(self) -> str | None:
        if not self._is_searched:
            self._is_searched = True
            self._rest = self._search()
        return self._rest

    def _search(self) -> str | None:
        written = self._written
        if not _BEGINNING.fullmatch(written) or (self._bounds.is_integer and "." in written):
            return None
        rest = next(self._rests(written), None)
        if written or rest is not None:
            return rest
        rest = next(self._rests("-"), None)
        return None if rest is None else "-" + rest

    def _rests(self, written: str) -> Iterator[str]:
        """Rests that complete a number within the bounds, shortest first."""
        is_negative, digits = written.startswith("-"), written.lstrip("-")
        whole, point, decimals = digits.partition(".")
        if point:
            for more in range(0 if decimals else 1, _MOST_DECIMALS):
                yield from self._with(whole, 0, decimals, more, is_negative, "")
            return
        for length in range(_MOST_DIGITS + _MOST_DECIMALS):
            for more in range(min(length, _MOST_DIGITS), -1, -1):
                num_decimals = length - more - 1
                if not num_decimals or (num_decimals > 0 and self._bounds.is_integer):
                    continue
                yield from self._with(whole, more, "", max(0, num_decimals), is_negative, ".")

    def _with(
        self,
        whole: str,
        more: int,
        decimals: str,
        more_decimals: int,
        is_negative: bool,
        point: str,
    ) -> Iterator[str]:
        """The rest with this many more digits before and after the point."""
        if not whole + "0" * more or (whole == "0" and more):
            return
        num_decimals = len(decimals) + more_decimals
        free = more + more_decimals
        base = int(whole + decimals or "0") * 10**free
        first, last = base, base + 10**free - 1
        if not whole and more > 1:
            first = 10 ** (free - 1)
        found = self._bounds.smallest(first, last, num_decimals, is_negative)
        if found is None:
            return
        text = str(found).zfill(len(whole) + more + num_decimals)
        rest = text[len(whole) + len(decimals) :]
        yield rest[:more] + (point if more_decimals and point else "") + rest[more:]
