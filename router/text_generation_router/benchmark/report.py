"""The figures of all batches: as they are collected, as tables, as JSON and CSV."""

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from text_generation_router.benchmark.measure import Run, Shape

STEPS = ("prefill", "decode_token", "decode_total")
_TITLES = {"prefill": "Prefill", "decode_token": "Decode (token)", "decode_total": "Decode (total)"}


@dataclass(frozen=True, slots=True)
class Spread:
    """How figures are distributed."""

    average: float
    lowest: float
    highest: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value; percentiles are values that occurred."""
        ordered = sorted(values)

        def percentile(share: float) -> float:
            return ordered[round(share * (len(ordered) - 1))]

        return cls(
            statistics.fmean(ordered),
            ordered[0],
            ordered[-1],
            percentile(0.5),
            percentile(0.9),
            percentile(0.99),
        )


@dataclass(slots=True)
class Figures:
    """The runs of one batch."""

    shape: Shape
    runs: list[Run] = field(default_factory=list)

    def latencies_ms(self, step: str) -> list[float]:
        """Of the prefills, of single decode steps, or of all decode steps of a run together."""
        if step == "prefill":
            return [1000 * run.prefill_s for run in self.runs]
        if step == "decode_token":
            return [1000 * seconds for run in self.runs for seconds in run.decode_s]
        return [1000 * sum(run.decode_s) for run in self.runs if run.decode_s]

    def tokens_per_s(self, step: str) -> list[float]:
        """Prompt tokens computed, or tokens generated, by the whole batch in each run."""
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
    """Three tables: what was asked, latencies, throughputs."""
    lines = ["| Parameter | Value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in parameters.items()]
    lines += [
        "",
        "| Step | Batch Size | Sequence Length | Average | Lowest | Highest | p50 | p90 | p99 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step, title, figures in _rows(all_figures):
        one = Spread.of(figures.latencies_ms(step))
        cells = (one.average, one.lowest, one.highest, one.p50, one.p90, one.p99)
        values = " | ".join(f"{cell:.2f} ms" for cell in cells)
        lines.append(f"| {title} | {_shape(figures)} | {values} |")
    lines += [
        "",
        "| Step | Batch Size | Sequence Length | Average | Lowest | Highest |",
        "|---|---|---|---|---|---|",
    ]
    for step, title, figures in _rows(all_figures):
        if step == "decode_token":
            continue
        one = Spread.of(figures.tokens_per_s(step))
        values = " | ".join(
            f"{cell:.1f} tokens/s" for cell in (one.average, one.lowest, one.highest)
        )
        lines.append(f"| {title.split()[0]} | {_shape(figures)} | {values} |")
    return "\n".join(lines)


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


def _rows(all_figures: Sequence[Figures]) -> Iterator[tuple[str, str, Figures]]:
    """Step by step, the batches that have figures for it."""
    for step in STEPS:
        for figures in all_figures:
            if figures.latencies_ms(step):
                yield step, _TITLES[step], figures


def _shape(figures: Figures) -> str:
    return f"{figures.shape.batch_size} | {figures.shape.sequence_length}"
