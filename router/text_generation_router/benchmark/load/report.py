"""The figures of a load as live rows, tables, JSON and CSV, and notes about them."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from text_generation_router.benchmark.display import Layout
from text_generation_router.benchmark.load.api import Target
from text_generation_router.benchmark.load.figures import (
    METRICS,
    LoadFigures,
    median_tokens,
    milliseconds,
)
from text_generation_router.benchmark.report import Spread, latency_cells, table

# The live table only shows the latest streams: sorting all would delay the running ones.
_LATEST = {"ttft": 200, "itl": 20, "tpot": 200}
# Above this share of a core, the client itself may limit the figures.
_BUSY_SHARE = 0.8


def _rates(figures: LoadFigures) -> list[str]:
    return [
        f"{figures.per_second(figures.num_good):,.2f}",
        f"{figures.per_second(figures.tokens_in):,.1f}" if figures.tokens_in else "–",
        f"{figures.per_second(figures.tokens_out):,.1f}",
    ]


def _asked_and_got(asked: int | None, got: float | None) -> str:
    return f"{'–' if asked is None else asked}/{'–' if got is None else f'{got:g}'}"


def _percentiles(figures: LoadFigures, metric: str, last: int) -> str:
    """Of the latest streams, or of all after the end of the point."""
    spread = None
    if figures.ended_s is not None:
        spread = figures.spread(metric)
    elif values := milliseconds(metric, figures.good(last)):
        spread = Spread.of(values)
    return "–" if spread is None else f"{spread.p50:,.1f} {spread.p90:,.1f} {spread.p99:,.1f}"


def _row(figures: LoadFigures) -> list[str]:
    """The row of a point: of its latest streams, or of all after its end."""
    latest = figures.good(None if figures.ended_s is not None else _LATEST["ttft"])
    ttft = "ttft" if figures.point.rate is None else "ttft_from_due"
    return [
        str(figures.point),
        str(figures.num_good),
        str(figures.num_errors),
        _percentiles(figures, ttft, _LATEST["ttft"]),
        _percentiles(figures, "itl", _LATEST["itl"]),
        _percentiles(figures, "tpot", _LATEST["tpot"]),
        *(_rates(figures) if figures.num_good else "–––"),
        _asked_and_got(figures.output_tokens, median_tokens(latest)[1]),
    ]


class LiveRows:
    """The rows of the live table. Caches those of points that have ended."""

    def __init__(self) -> None:
        self._ready: dict[int, list[str]] = {}

    def cells(self, figures: LoadFigures) -> list[str]:
        """The cells of one point."""
        if id(figures) in self._ready:
            return self._ready[id(figures)]
        cells = _row(figures)
        if figures.ended_s is not None:
            self._ready[id(figures)] = cells
        return cells

    def layout(self) -> Layout[LoadFigures]:
        """Drawn once per second, because drawing delays the streams."""
        columns = (
            *("load", "ok", "errors", "first token ms p50 p90 p99"),
            *("between tokens ms p50 p90 p99", "per token ms p50 p90 p99"),
            *("requests/s", "tokens/s in", "tokens/s out", "tokens asked/got"),
        )
        return Layout(columns, self.cells, "percent", refresh_per_second=1)


def markdown(parameters: dict[str, Any], all_figures: Sequence[LoadFigures]) -> str:
    """Tables of parameters, throughput, times and errors."""
    head = ("Load", "OK", "Errors", "Seconds", "Requests/s", "Tokens/s in", "Tokens/s out")
    lines = [
        *table(("Parameter", "Value"), parameters.items()),
        "",
        *table((*head, "Tokens in asked/got", "Tokens out asked/got"), map(_through, all_figures)),
    ]
    times = [
        (METRICS[name], figures.point, *latency_cells(spread))
        for name, figures, spread in _metrics(all_figures)
    ]
    if times:
        names = ("Time", "Load", "Average", "Lowest", "Highest", "p50", "p90", "p99")
        lines += ["", *table(names, times)]
    errors = [
        (kind, figures.point, count, message.replace("|", "\\|"))
        for figures in all_figures
        for kind, (count, message) in figures.errors().items()
    ]
    if errors:
        lines += ["", *table(("Error", "Load", "Count", "The first one"), errors)]
    return "\n".join(lines)


def _through(figures: LoadFigures) -> tuple[object, ...]:
    got_in, got_out = median_tokens(figures.good())
    return (
        figures.point,
        figures.num_good,
        figures.num_errors,
        f"{figures.elapsed_s:.1f}",
        *_rates(figures),
        _asked_and_got(figures.input_tokens, got_in),
        _asked_and_got(figures.output_tokens, got_out),
    )


def _metrics(
    all_figures: Sequence[LoadFigures],
) -> Iterator[tuple[str, LoadFigures, Spread]]:
    """Metric by metric, the points that have values of it, in milliseconds."""
    for name in METRICS:
        for figures in all_figures:
            spread = figures.spread(name) if name in figures.metrics else None
            if spread is not None:
                yield name, figures, spread


def as_dict(
    parameters: dict[str, Any], notes: Sequence[str], all_figures: Sequence[LoadFigures]
) -> dict[str, Any]:
    """For JSON."""
    points = {id(figures): figures.as_dict() for figures in all_figures}
    for figures in all_figures:
        points[id(figures)]["errors"] = {
            kind: {"count": count, "first": message}
            for kind, (count, message) in figures.errors().items()
        }
    for name, figures, spread in _metrics(all_figures):
        points[id(figures)][f"{name}_ms"] = asdict(spread)
    return {"parameters": parameters, "notes": [*notes], "points": [*points.values()]}


def as_csv(all_figures: Sequence[LoadFigures]) -> str:
    """One line per point; errors as `kind: count`."""
    rows = {id(figures): figures.as_dict() for figures in all_figures}
    for figures in all_figures:
        counts = (f"{kind}: {count}" for kind, (count, _) in figures.errors().items())
        rows[id(figures)]["errors"] = "; ".join(counts)
    head = [*next(iter(rows.values()))]
    head += [f"{metric}_ms_{name}" for metric in METRICS for name in Spread.__dataclass_fields__]
    for metric, figures, spread in _metrics(all_figures):
        found = asdict(spread).items()
        rows[id(figures)] |= {f"{metric}_ms_{name}": value for name, value in found}
    file = io.StringIO()
    writer = csv.DictWriter(file, head, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return file.getvalue()


def notes(target: Target, all_figures: Sequence[LoadFigures]) -> list[str]:
    """Notes about the figures; answers with the wrong length come last."""
    found = []
    if target.refused:
        names = ", ".join(sorted(target.refused))
        found.append(f"Note: the requests omit fields that the server refuses: {names}.")
    for figures in all_figures:
        found += [f"Note: {figures.point}: {text}" for text in _notes(figures)]
    for figures in all_figures:
        if text := _shortfall(target, figures):
            found.append(f"Warning: {figures.point}: {text}")
    return found


def _notes(figures: LoadFigures) -> Iterator[str]:
    if figures.interrupted:
        yield f"interrupted; running streams, not counted: {figures.interrupted}."
    if "events" in figures.counted_by():
        yield (
            "the server does not report the number of tokens (no usage); "
            "events with text are counted, each of which may have several tokens."
        )
    if figures.tokens_per_event() > 1.05:
        yield (
            f"an event has {figures.tokens_per_event():.2f} tokens on average; "
            "the time between tokens is the time between events."
        )
    if figures.cpu_share > _BUSY_SHARE and figures.elapsed_s > 1:
        yield (
            f"this client used {figures.cpu_share:.0%} of a core and may limit the figures; "
            "run several clients, on another machine."
        )


def _shortfall(target: Target, figures: LoadFigures) -> str | None:
    """A warning about answers that are shorter or longer than requested."""
    got = median_tokens(figures.good())[1]
    asked = figures.output_tokens
    if got is None or got == asked:
        return None
    if got > asked:
        return f"the median answer has {got:g} tokens; at most {asked} were requested."
    if not target.ignore_eos:
        return None
    why = (
        "the server does not ignore the end of sequence, although the requests ask for it"
        if target.is_asked_to_ignore_eos
        else "the server refuses to ignore the end of sequence"
    )
    return f"the median answer has {got:g} tokens; {asked} were requested: {why}."
