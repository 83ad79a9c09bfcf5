"""Distributions, tables and files of a report."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of values."""

    average: float
    lowest: float
    highest: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of at least one value."""
        ordered = sorted(values)
        p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(ordered), ordered[0], ordered[-1], p50, p90, p99)

    def cells(self, unit: str) -> list[str]:
        """Average, lowest, highest, p50, p90, p99."""
        values = (self.average, self.lowest, self.highest, self.p50, self.p90, self.p99)
        return [f"{value:.2f} {unit}" for value in values]


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else float("nan")


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def write_outputs(paths: Sequence[Path], report: Mapping[str, Any]) -> None:
    """Writes JSON to each path. Raises OSError."""
    for path in paths:
        path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


def spreads(named: Mapping[str, Iterable[float]]) -> dict[str, Spread]:
    """The distribution of each that has values."""
    found = {name: list(values) for name, values in named.items()}
    return {name: Spread.of(values) for name, values in found.items() if values}


def as_dicts(named: Mapping[str, Spread]) -> dict[str, dict[str, float]]:
    """For JSON and CSV."""
    return {name: asdict(spread) for name, spread in named.items()}
