"""The figures of one point of a load."""

import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from text_generation_router.benchmark.report import Spread

METRICS = {
    "ttft_from_due": "Time to first token, from when it was due",
    "ttft": "Time to first token",
    "itl": "Time between tokens",
    "tpot": "Time per output token",
    "latency": "Whole request",
}
"""vLLM's names, and the titles in the report."""


@dataclass(frozen=True, slots=True)
class Point:
    """A load: a number of clients in a closed loop, or arrivals per second."""

    clients: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return "1 client" if self.clients == 1 else f"{self.clients} clients"


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended; times by time.perf_counter."""

    due_s: float
    """When it was due; in a closed loop, when it was sent."""
    sent_s: float
    """When it began, before a connection was opened."""
    ended_s: float
    times: "array[float]"
    """When each event with text arrived."""
    last_s: float
    """When the generation's last event arrived."""
    counts: tuple[int, int] | None
    """(prompt tokens, generated tokens), if the server reported them."""
    failure: tuple[str, str] | None = None
    """(kind, message)."""

    @property
    def output_tokens(self) -> int:
        """As the server counts, else the number of events with text."""
        return len(self.times) if self.counts is None else self.counts[1]

    @property
    def time_per_token(self) -> float | None:
        """From the first token to the last, per token after the first."""
        behind_first = self.output_tokens - 1
        if not self.times or behind_first < 1:
            return None
        return (self.last_s - self.times[0]) / behind_first


@dataclass(slots=True)
class LoadFigures:
    """All results of one point."""

    point: Point
    output_tokens: int
    """Of each request, as asked for."""
    input_tokens: int | None
    """Of each request, as asked for; None: the prompts come from a file."""
    results: list[Result] = field(default_factory=list)
    interrupted: int = 0
    """Streams that Ctrl-C ended; neither good nor an error."""
    started_s: float | None = None
    ended_s: float | None = None
    cpu_share: float = 0.0
    """Of one core, taken by this process."""
    num_errors: int = 0
    tokens_in: int = 0
    """Of successful requests, as the server reports them; 0 if it does not."""
    tokens_out: int = 0
    """Of successful requests."""
    _spreads: dict[str, Spread | None] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Adds the result of a request."""
        self.results.append(result)
        if result.failure is not None:
            self.num_errors += 1
            return
        self.tokens_in += result.counts[0] if result.counts is not None else 0
        self.tokens_out += result.output_tokens

    @property
    def num_good(self) -> int:
        """The number of successful requests."""
        return len(self.results) - self.num_errors

    def good(self, last: int | None = None) -> list[Result]:
        """The successful results among the `last` ones, or all. Only these have times."""
        results = self.results if last is None else self.results[-last:]
        return [result for result in results if result.failure is None]

    def spread(self, metric: str) -> Spread | None:
        """The distribution of one of METRICS, if it has values. Cached after the point has ended,
        because sorting millions of values takes seconds."""
        if metric in self._spreads:
            return self._spreads[metric]
        values = milliseconds(metric, self.good())
        spread = Spread.of(values) if values else None
        if self.ended_s is not None:
            self._spreads[metric] = spread
        return spread

    @property
    def elapsed_s(self) -> float:
        """From the first request to the end of the last one, or until now."""
        if self.started_s is None:
            return 0.0
        return (time.perf_counter() if self.ended_s is None else self.ended_s) - self.started_s

    @property
    def metrics(self) -> list[str]:
        """The METRICS that apply: in a closed loop no request is sent later than due."""
        return [name for name in METRICS if self.point.rate is not None or name != "ttft_from_due"]

    def errors(self) -> dict[str, tuple[int, str]]:
        """The count and first message of each kind, most frequent first."""
        failures = [one.failure for one in self.results if one.failure is not None]
        messages = dict(reversed(failures))
        counts = Counter(kind for kind, _ in failures)
        return {kind: (count, messages[kind]) for kind, count in counts.most_common()}

    def per_second(self, num: int) -> float:
        """The rate over the whole time."""
        return num / self.elapsed_s if self.elapsed_s else 0.0

    def counted_by(self) -> str:
        """The source of the numbers of generated tokens: `server`, `events` or both."""
        kinds = {"events" if one.counts is None else "server" for one in self.good()}
        return "+".join(sorted(kinds))

    def tokens_per_event(self) -> float:
        """Average over the successful requests."""
        num_events = sum(len(one.times) for one in self.good())
        return self.tokens_out / num_events if num_events else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the times."""
        got_in, got_out = median_tokens(self.good())
        return {
            "clients": self.point.clients,
            "rate": self.point.rate,
            "requests_ok": self.num_good,
            "requests_failed": self.num_errors,
            "requests_interrupted": self.interrupted,
            "elapsed_s": self.elapsed_s,
            "requests_per_s": self.per_second(self.num_good),
            "input_tokens_per_s": self.per_second(self.tokens_in),
            "output_tokens_per_s": self.per_second(self.tokens_out),
            "input_tokens_asked": self.input_tokens,
            "input_tokens_got_p50": got_in,
            "output_tokens_asked": self.output_tokens,
            "output_tokens_got_p50": got_out,
            "output_tokens_counted_by": self.counted_by(),
            "tokens_per_event": self.tokens_per_event(),
            "client_cpu_share": self.cpu_share,
        }


def milliseconds(metric: str, results: Sequence[Result]) -> list[float]:
    """All values of one of METRICS."""
    return [1000 * seconds for seconds in _SECONDS[metric](results)]


def median_tokens(results: Sequence[Result]) -> tuple[float | None, float | None]:
    """The median tokens of a request, in and out; None if unknown."""
    got_in = [one.counts[0] for one in results if one.counts is not None]
    got_out = [one.output_tokens for one in results]
    return (
        statistics.median(got_in) if got_in else None,
        statistics.median(got_out) if got_out else None,
    )


_SECONDS: dict[str, Callable[[Sequence[Result]], Iterable[float]]] = {
    "ttft_from_due": lambda results: (one.times[0] - one.due_s for one in results if one.times),
    "ttft": lambda results: (one.times[0] - one.sent_s for one in results if one.times),
    "itl": lambda results: (
        later - sooner for one in results for sooner, later in pairwise(one.times)
    ),
    "tpot": lambda results: (value for one in results if (value := one.time_per_token) is not None),
    "latency": lambda results: (one.ended_s - one.sent_s for one in results),
}
