"""The figures of all batches, and their tables, JSON and CSV."""

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from text_generation_router.benchmark.measure import Run, Shape

STEPS = ("prefill", "decode_token", "decode_total")
_TITLES = {"prefill": "Prefill", "decode_token": "Decode (token)", "decode_total": "Decode (total)"}


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
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value; percentiles are values of the list."""
        ordered = sorted(values)

        def percentile(share: float) -> float:
            return ordered[round(share * (len(ordered) - 1))]

        percentiles = map(percentile, (0.5, 0.9, 0.99))
        return cls(statistics.fmean(ordered), ordered[0], ordered[-1], *percentiles)


@dataclass(slots=True)
class Figures:
    """The runs of one batch."""

    shape: Shape
    runs: list[Run] = field(default_factory=list)

    def latencies_ms(self, step: str) -> list[float]:
        """Of each prefill, of each decode step, or of all decode steps of each run together."""
        if step == "prefill":
            return [1000 * run.prefill_s for run in self.runs]
        if step == "decode_token":
            return [1000 * seconds for run in self.runs for seconds in run.decode_s]
        return [1000 * sum(run.decode_s) for run in self.runs if run.decode_s]

    def tokens_per_s(self, step: str) -> list[float]:
        """Throughput of the whole batch in each run, in prompt tokens or generated tokens."""
        if step == "prefill":
            return [self.shape.num_prompt_tokens / run.prefill_s for run in self.runs]
        return [
            len(run.decode_s) * self.shape.batch_size / sum(run.decode_s)
            for run in self.runs
            if run.decode_s
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = asdict(self.shape)
        for step in STEPS:
            if latencies := self.latencies_ms(step):
                found[step] = {
                    "latency_ms": asdict(Spread.of(latencies)),
                    "tokens_per_s": asdict(Spread.of(self.tokens_per_s(step))),
                }
        return found


def markdown(parameters: dict[str, Any], all_figures: Sequence[Figures]) -> str:
    """Three tables: parameters, latencies, throughputs."""
    shape = ("Batch Size", "Sequence Length")
    latencies = [
        (title, *_shape(figures), *latency_cells(Spread.of(figures.latencies_ms(step))))
        for step, title, figures in _rows(all_figures)
    ]
    throughputs = []
    for step, title, figures in _rows(all_figures):
        if step != "decode_token":
            one = Spread.of(figures.tokens_per_s(step))
            cells = [f"{cell:.1f} tokens/s" for cell in (one.average, one.lowest, one.highest)]
            throughputs.append((title.split()[0], *_shape(figures), *cells))
    lines = [
        *table(("Parameter", "Value"), parameters.items()),
        "",
        *table(("Step", *shape, "Average", "Lowest", "Highest", "p50", "p90", "p99"), latencies),
        "",
        *table(("Step", *shape, "Average", "Lowest", "Highest"), throughputs),
    ]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def latency_cells(one: Spread) -> list[str]:
    """Average, lowest, highest, p50, p90, p99 of milliseconds."""
    return [f"{value:.2f} ms" for value in astuple(one)]


def as_csv(all_figures: Sequence[Figures]) -> str:
    """One line for each batch and step."""
    file = io.StringIO()
    names = list(Spread.__dataclass_fields__)
    head = ["step", "batch_size", "sequence_length", "decode_length"]
    head += [f"latency_ms_{name}" for name in names] + [f"tokens_per_s_{name}" for name in names]
    writer = csv.DictWriter(file, head, lineterminator="\n")
    writer.writeheader()
    for step, _, figures in _rows(all_figures):
        row: dict[str, Any] = {"step": step, **asdict(figures.shape)}
        for prefix, values in (
            ("latency_ms", figures.latencies_ms(step)),
            ("tokens_per_s", figures.tokens_per_s(step)),
        ):
            row |= {f"{prefix}_{name}": value for name, value in asdict(Spread.of(values)).items()}
        writer.writerow(row)
    return file.getvalue()


def write_outputs(paths: Sequence[Path], report: dict[str, Any], csv_text: str) -> None:
    """Writes CSV or JSON to each path, by its suffix. Raises OSError."""
    for path in paths:
        if path.suffix == ".csv":
            path.write_text(csv_text)
        else:
            path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


def _rows(all_figures: Sequence[Figures]) -> Iterator[tuple[str, str, Figures]]:
    """The batches that have figures, by step."""
    for step in STEPS:
        for figures in all_figures:
            if figures.latencies_ms(step):
                yield step, _TITLES[step], figures


def _shape(figures: Figures) -> tuple[int, int]:
    return figures.shape.batch_size, figures.shape.sequence_length
