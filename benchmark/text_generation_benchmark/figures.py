"""The figures of a load, their tables and notes."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from text_generation_benchmark.load import Load
from text_generation_benchmark.report import Spread, as_dicts, spreads, table
from text_generation_benchmark.streams import Stream

SHOWN = (
    *("requests_ok", "requests_failed", "ttft_from_due_ms", "ttft_ms", "itl_ms", "tpot_ms"),
    *("requests_per_s", "output_tokens_per_s", "output_tokens_got_p50"),
)
"""The figures of the line that is printed when a point is complete."""
# Above this share of a core, the client itself may limit the figures.
_BUSY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Point:
    """One load: a number of clients in a closed loop, or arrivals per second."""

    clients: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return "1 client" if self.clients == 1 else f"{self.clients} clients"


@dataclass(slots=True)
class Figures:
    """The figures of one point."""

    point: Point
    output_tokens: int
    """Of each request, as asked for."""
    input_tokens: int | None
    """Of each request, as asked for; None: the prompts come from a file."""
    load: Load
    _spreads: dict[str, Spread] | None = None

    @property
    def good(self) -> list[Stream]:
        """The successful streams. Only these have times."""
        return [stream for stream in self.load.ended if stream.failure is None]

    def spreads(self) -> dict[str, Spread]:
        """Of each metric that has values; sorted once, because that takes seconds for millions."""
        if self._spreads is None:
            self._spreads = spreads(milliseconds(self.good, self.point.rate is not None))
        return self._spreads

    def errors(self) -> dict[str, dict[str, Any]]:
        """The count and first message of each kind, most frequent first."""
        failures = [stream.failure for stream in self.load.ended if stream.failure is not None]
        first = dict(reversed(failures))
        counts = Counter(kind for kind, _ in failures)
        return {kind: {"count": n, "first": first[kind]} for kind, n in counts.most_common()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the times."""
        good, elapsed_s = self.good, self.load.elapsed_s or 1.0
        tokens_in = sum(stream.counts[0] for stream in good if stream.counts is not None)
        tokens_out = sum(stream.output_tokens for stream in good)
        got_in, got_out = median_tokens(good)
        counted_by = {"events" if stream.counts is None else "server" for stream in good}
        return {
            "clients": self.point.clients,
            "rate": self.point.rate,
            "requests_ok": len(good),
            "requests_failed": len(self.load.ended) - len(good),
            "requests_interrupted": len(self.load.running),
            "elapsed_s": self.load.elapsed_s,
            "requests_per_s": len(good) / elapsed_s,
            "input_tokens_per_s": tokens_in / elapsed_s,
            "output_tokens_per_s": tokens_out / elapsed_s,
            "input_tokens_asked": self.input_tokens,
            "input_tokens_got_p50": got_in,
            "output_tokens_asked": self.output_tokens,
            "output_tokens_got_p50": got_out,
            "output_tokens_counted_by": "+".join(sorted(counted_by)),
            "tokens_per_event": tokens_out / (sum(len(one.times) for one in good) or 1),
            "client_cpu_share": self.load.cpu_share,
        }


def milliseconds(streams: Sequence[Stream], is_open_loop: bool) -> dict[str, Iterable[float]]:
    """All values of each metric, by vLLM's names. ttft_from_due_ms is that of an open loop: there
    requests may be sent later than they are due."""
    begun = [stream for stream in streams if stream.times]
    due = {"ttft_from_due_ms": (1000 * (stream.times[0] - stream.due_s) for stream in begun)}
    per_token = (stream.time_per_token for stream in streams)
    return {
        **(due if is_open_loop else {}),
        "ttft_ms": (1000 * (stream.times[0] - stream.sent_s) for stream in begun),
        "itl_ms": (1000 * (b - a) for stream in begun for a, b in pairwise(stream.times)),
        "tpot_ms": (1000 * seconds for seconds in per_token if seconds is not None),
        "latency_ms": (1000 * (stream.ended_s - stream.sent_s) for stream in streams),
    }


def median_tokens(streams: Sequence[Stream]) -> tuple[float | None, float | None]:
    """The median tokens of a request, in and out; None if unknown."""
    got_in = [stream.counts[0] for stream in streams if stream.counts is not None]
    got_out = [stream.output_tokens for stream in streams]
    return (
        statistics.median(got_in) if got_in else None,
        statistics.median(got_out) if got_out else None,
    )


def rows(points: Sequence[Figures]) -> list[dict[str, Any]]:
    """The figures of each point, for JSON."""
    return [one.as_dict() | {"errors": one.errors()} | as_dicts(one.spreads()) for one in points]


def line(one: Figures) -> str:
    """The most important figures of a point."""
    [found] = rows([one])
    cells = (f"{name} {_cell(found[name])}" for name in SHOWN if name in found)
    return f"{one.point}: {', '.join(cells)}"


def markdown(parameters: Mapping[str, Any], points: Sequence[Figures]) -> str:
    """Tables of parameters, of figures by point, and of errors."""
    found = rows(points)
    names = dict.fromkeys(name for row in found for name in row if name != "errors")
    figures = [(name, *(_cell(row.get(name)) for row in found)) for name in names]
    lines = [*table(("Parameter", "Value"), parameters.items()), ""]
    lines += table(("Figure", *(str(one.point) for one in points)), figures)
    errors = [
        (kind, one.point, found["count"], found["first"].replace("|", "\\|"))
        for one in points
        for kind, found in one.errors().items()
    ]
    lines += ["", *table(("Error", "Load", "Count", "The first one"), errors)] if errors else []
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Of a distribution: median, 90th and 99th percentile."""
    if isinstance(value, Mapping):
        return " / ".join(f"{value[name]:,.1f}" for name in ("p50", "p90", "p99"))
    if isinstance(value, float):
        return f"{value:,.2f}"
    return "–" if value is None else str(value)


def notes(one: Figures, ignore_eos: bool) -> Iterator[str]:
    """What limits the figures of a point."""
    figures = one.as_dict()
    if running := figures["requests_interrupted"]:
        yield f"interrupted; running streams, not counted: {running}."
    if "events" in figures["output_tokens_counted_by"]:
        yield (
            "the server does not report the number of tokens (no usage); "
            "events with text are counted, each of which may have several tokens."
        )
    if figures["tokens_per_event"] > 1.05:
        yield (
            f"an event has {figures['tokens_per_event']:.2f} tokens on average; "
            "the time between tokens is the time between events."
        )
    if one.load.cpu_share > _BUSY_SHARE and one.load.elapsed_s > 1:
        yield (
            f"this client used {one.load.cpu_share:.0%} of a core and may limit the figures; "
            "run several clients, on another machine."
        )
    got, asked = figures["output_tokens_got_p50"], one.output_tokens
    if got is not None and (got > asked or (got < asked and ignore_eos)):
        yield (
            f"the median answer has {got:g} tokens, and {asked} were requested: the server "
            "does not follow the limit, or does not ignore the end of sequence."
        )
