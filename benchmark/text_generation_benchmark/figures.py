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

METRICS = {
    "ttft_from_due_ms": "Time to first token, from when it was due",
    "ttft_ms": "Time to first token",
    "itl_ms": "Time between tokens",
    "tpot_ms": "Time per output token",
    "latency_ms": "Whole request",
}
"""vLLM's names, and the titles in the report."""
COLUMNS = (
    *("load", "ok", "errors", "first token ms p50 p90 p99"),
    *("between tokens ms p50 p90 p99", "per token ms p50 p90 p99"),
    *("requests/s", "tokens/s in", "tokens/s out", "tokens asked/got"),
)
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
        """The METRICS that have values; sorted once, because that takes seconds for millions."""
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

    def row(self) -> list[str]:
        """The cells of COLUMNS."""
        found, figures = self.spreads(), self.as_dict()
        first = "ttft_ms" if self.point.rate is None else "ttft_from_due_ms"
        return [
            str(self.point),
            str(figures["requests_ok"]),
            str(figures["requests_failed"]),
            *(_percentiles(found.get(name)) for name in (first, "itl_ms", "tpot_ms")),
            *_rates(figures),
            _asked_and_got(figures, "output"),
        ]


def milliseconds(streams: Sequence[Stream], is_open_loop: bool) -> dict[str, Iterable[float]]:
    """All values of each of METRICS; in a closed loop no request is sent later than due."""
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


def _percentiles(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.p50:,.1f} {spread.p90:,.1f} {spread.p99:,.1f}"


def _rates(figures: Mapping[str, Any]) -> list[str]:
    names = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")
    return [f"{figures[name]:,.2f}" for name in names]


def _asked_and_got(figures: Mapping[str, Any], which: str) -> str:
    asked, got = figures[f"{which}_tokens_asked"], figures[f"{which}_tokens_got_p50"]
    return f"{'–' if asked is None else asked}/{'–' if got is None else f'{got:g}'}"


def markdown(parameters: Mapping[str, Any], points: Sequence[Figures]) -> str:
    """Tables of parameters, throughput, times and errors."""
    head = ["Load", "OK", "Errors", "Seconds", "Requests/s", "Tokens/s in", "Tokens/s out"]
    head += ["Tokens in asked/got", "Tokens out asked/got"]
    through = []
    for one in points:
        found = one.as_dict()
        counts = (one.point, found["requests_ok"], found["requests_failed"])
        got = (_asked_and_got(found, which) for which in ("input", "output"))
        through.append((*counts, f"{found['elapsed_s']:.1f}", *_rates(found), *got))
    times = [
        (title, one.point, *one.spreads()[name].cells("ms"))
        for name, title in METRICS.items()
        for one in points
        if name in one.spreads()
    ]
    errors = [
        (kind, one.point, found["count"], found["first"].replace("|", "\\|"))
        for one in points
        for kind, found in one.errors().items()
    ]
    lines = [*table(("Parameter", "Value"), parameters.items()), "", *table(head, through)]
    names = ("Time", "Load", "Average", "Lowest", "Highest", "p50", "p90", "p99")
    lines += ["", *table(names, times)] if times else []
    lines += ["", *table(("Error", "Load", "Count", "The first one"), errors)] if errors else []
    return "\n".join(lines)


def rows(points: Sequence[Figures]) -> list[dict[str, Any]]:
    """The figures of each point, for JSON."""
    return [one.as_dict() | {"errors": one.errors()} | as_dicts(one.spreads()) for one in points]


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
