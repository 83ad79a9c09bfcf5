"""The figures of a load, their tables and notes."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from text_generation_benchmark.load import Load
from text_generation_benchmark.report import as_dicts, spreads, table
from text_generation_benchmark.streams import Stream

_IN_LINE = (
    *("requests_ok", "requests_failed", "ttft_from_due_ms", "ttft_ms", "itl_ms", "tpot_ms"),
    *("requests_per_s", "output_tokens_per_s", "output_tokens_got_p50"),
)
# Above this share of a core, the client itself may limit the figures.
_BUSY_SHARE = 0.8

Figures = Mapping[str, Any]
"""The figures of one point by name, as in JSON; those that end in _ms are distributions."""


@dataclass(frozen=True, slots=True)
class Point:
    """One load: a number of clients in a closed loop, or arrivals per second."""

    output_tokens: int
    """Of each request, as asked for."""
    input_tokens: int | None
    """Of each request, as asked for; None: the prompts come from a file."""
    clients: int | None = None
    rate: float | None = None

    def figures(self, load: Load) -> Figures:
        """Of the load so far. Only successful streams have times."""
        elapsed_s = load.elapsed_s or 1.0
        good = [stream for stream in load.ended if stream.failure is None]
        got_in = [stream.counts[0] for stream in good if stream.counts is not None]
        got_out = [stream.output_tokens for stream in good]
        counted_by = {"events" if stream.counts is None else "server" for stream in good}
        return {
            "clients": self.clients,
            "rate": self.rate,
            "requests_ok": len(good),
            "requests_failed": len(load.ended) - len(good),
            "requests_interrupted": len(load.running),
            "elapsed_s": load.elapsed_s,
            "requests_per_s": len(good) / elapsed_s,
            "input_tokens_per_s": sum(got_in) / elapsed_s,
            "output_tokens_per_s": sum(got_out) / elapsed_s,
            "input_tokens_asked": self.input_tokens,
            "input_tokens_got_p50": statistics.median(got_in) if got_in else None,
            "output_tokens_asked": self.output_tokens,
            "output_tokens_got_p50": statistics.median(got_out) if got_out else None,
            "output_tokens_counted_by": "+".join(sorted(counted_by)),
            "tokens_per_event": sum(got_out) / (sum(len(one.times) for one in good) or 1),
            "client_cpu_share": load.cpu_share,
            **as_dicts(spreads(milliseconds(good, self.rate is not None))),
            "errors": _errors([one.failure for one in load.ended if one.failure is not None]),
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


def _errors(failures: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The count and first message of each kind, most frequent first."""
    first, counts = dict(reversed(failures)), Counter(kind for kind, _ in failures)
    return {kind: {"count": n, "first": first[kind]} for kind, n in counts.most_common()}


def label(figures: Figures) -> str:
    """The load of these figures."""
    if figures["rate"] is not None:
        return f"{figures['rate']:g} requests/s"
    return "1 client" if figures["clients"] == 1 else f"{figures['clients']} clients"


def line(figures: Figures) -> str:
    """The most important figures of a point."""
    cells = (f"{name} {_cell(figures[name])}" for name in _IN_LINE if name in figures)
    return f"{label(figures)}: {', '.join(cells)}"


def markdown(parameters: Mapping[str, Any], points: Sequence[Figures]) -> str:
    """Tables of parameters, of figures by point, and of errors."""
    names = dict.fromkeys(name for one in points for name in one if name != "errors")
    rows = [(name, *(_cell(one.get(name)) for one in points)) for name in names]
    lines = [*table(("Parameter", "Value"), parameters.items()), ""]
    lines += table(("Figure", *map(label, points)), rows)
    errors = [
        (kind, label(one), found["count"], found["first"].replace("|", "\\|"))
        for one in points
        for kind, found in one["errors"].items()
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


def notes(figures: Figures, ignore_eos: bool) -> Iterator[str]:
    """What limits the figures of a point."""
    if running := figures["requests_interrupted"]:
        yield f"interrupted; running streams, not counted: {running}."
    if "events" in figures["output_tokens_counted_by"]:
        yield (
            "the server does not report the number of tokens (no usage); "
            "events with text are counted, each of which may have several tokens."
        )
    if (per_event := figures["tokens_per_event"]) > 1.05:
        yield (
            f"an event has {per_event:.2f} tokens on average; the time between tokens is the time "
            "between events."
        )
    if (share := figures["client_cpu_share"]) > _BUSY_SHARE and figures["elapsed_s"] > 1:
        yield (
            f"this client used {share:.0%} of a core and may limit the figures; "
            "run several clients, on another machine."
        )
    got, asked = figures["output_tokens_got_p50"], figures["output_tokens_asked"]
    if got is not None and (got > asked or (got < asked and ignore_eos)):
        yield (
            f"the median answer has {got:g} tokens, and {asked} were requested: the server "
            "does not follow the limit, or does not ignore the end of sequence."
        )
