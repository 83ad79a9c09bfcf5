"""The metrics of `/metrics`: TGI's names and types, exactly, and some that TGI does not have.

prometheus_client is used only for the process's own metrics: it renames counters to `…_total` and
adds `…_created`, so that TGI's dashboards would not find them.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
_DURATION_BOUNDS = tuple(0.0001 * 1.5**k for k in range(1, 36))


# The name of the one label of a metric, and all its values; without values it has no series.
Label = tuple[str, tuple[str, ...]]
_NO_LABEL: Label = ("", ("",))
_METHOD: Label = ("method", ("prefill", "decode"))
_ERRORS = "overloaded validation generation incomplete dropped template timeout queue_wait"
_ERR: Label = ("err", tuple(_ERRORS.split()))
# TGI's label for the time of a join, in any call.
_JOINING: Label = ("method", ("decode",))
_KEY_LIMIT: Label = ("reason", ("requests", "tokens"))
_PROCESS: Label = ("process", ("shard", "router"))
_REASON: Label = ("reason", ("backpressure", "wait_exceeded", "chunking"))
# Why a connection was refused or closed; see connection.py.
_REFUSALS = "malformed head_size head_time silent body_rate bodies leftover pipelined unread"
_REFUSED: Label = ("reason", tuple(_REFUSALS.split()))


class _Metric:
    """A family of series, one per label value; all exist from the start. Calls name the label with
    its value; raises KeyError for another name or value."""

    kind: str
    # Set by `Metrics`.
    name: str

    def __init__(self, description: str, label: Label = _NO_LABEL) -> None:
        self._description = description
        self._label, self._values = label

    def render(self) -> Iterator[str]:
        """The family in Prometheus' text format, line by line."""
        yield f"# HELP {self.name} {self._description}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.samples()

    def samples(self) -> Iterator[str]:
        """Its series, line by line."""
        raise NotImplementedError

    def _sample(self, value: float, label_value: str, suffix: str = "", extra: str = "") -> str:
        label = f'{self._label}="{label_value}"' if self._label else ""
        inside = ",".join(part for part in (label, extra) if part)
        return f"{self.name}{suffix}{f'{{{inside}}}' if inside else ''} {value!r}"


class Counter(_Metric):
    """A number that only grows."""

    kind = "counter"

    def __init__(self, description: str, label: Label = _NO_LABEL) -> None:
        super().__init__(description, label)
        self._totals = dict.fromkeys(self._values, 0)

    def inc(self, amount: int = 1, **labels: str) -> None:
        """Adds `amount` to the series of the given label value."""
        self._totals[labels.get(self._label, "")] += amount

    def value(self, **labels: str) -> int:
        """The present total."""
        return self._totals[labels.get(self._label, "")]

    def samples(self) -> Iterator[str]:
        for label_value, total in self._totals.items():
            yield self._sample(total, label_value)


class Gauge(_Metric):
    """A number that goes up and down; of another kind, one that is counted elsewhere."""

    def __init__(self, description: str, kind: str = "gauge") -> None:
        super().__init__(description)
        self.kind = kind
        self.read: Callable[[], float] = lambda: 0
        """Returns the present number; called when the page is rendered."""

    @property
    def value(self) -> float:
        """The present number."""
        return self.read()

    def samples(self) -> Iterator[str]:
        yield self._sample(self.value, "")


class Histogram(_Metric):
    """A distribution over fixed buckets; an observation costs one bisection."""

    kind = "histogram"

    def __init__(
        self,
        description: str,
        bounds: Sequence[float],
        label: Label = _NO_LABEL,
    ) -> None:
        super().__init__(description, label)
        self._bounds = tuple(bounds)
        # One more than there are bounds.
        self._counts = {value: [0] * (len(bounds) + 1) for value in self._values}
        self._sums = dict.fromkeys(self._values, 0.0)

    def observe(self, value: float, times: int = 1, **labels: str) -> None:
        """Counts `value`, `times` times, in the first bucket whose bound is not below it."""
        label_value = labels.get(self._label, "")
        self._counts[label_value][bisect_left(self._bounds, value)] += times
        self._sums[label_value] += value * times

    def count(self, **labels: str) -> int:
        """How many values were observed."""
        return sum(self._counts[labels.get(self._label, "")])

    def samples(self) -> Iterator[str]:
        for label_value, counted in self._counts.items():
            # A copy: another thread may render /metrics, and all numbers must agree.
            counts, total = list(counted), 0
            for bound, count in zip((*map(repr, self._bounds), "+Inf"), counts, strict=True):
                total += count
                yield self._sample(total, label_value, "_bucket", f'le="{bound}"')
            yield self._sample(self._sums[label_value], label_value, "_sum")
            yield self._sample(total, label_value, "_count")


class Summary(_Metric):
    """Quantiles of the last 1024 observations, and buckets of all observations.

    TGI 3 exposes a summary, but its dashboard needs the buckets of TGI 2: both are here. A summary
    has no buckets, so they are a family of counters named `…_bucket`.
    """

    kind = "summary"

    def __init__(self, description: str, bounds: Sequence[float]) -> None:
        super().__init__(description)
        self._all = Histogram(description, bounds)
        self._recent: deque[float] = deque(maxlen=1024)

    def observe(self, value: float, times: int = 1) -> None:
        """Adds `times` equal observations."""
        self._recent.extend(repeat(value, times))
        self._all.observe(value, times)

    def render(self) -> Iterator[str]:
        """Both families."""
        self._all.name = self.name
        *buckets, total, count = self._all.samples()
        yield from super().render()
        yield from (total, count)
        yield f"# HELP {self.name}_bucket {self._description}"
        yield f"# TYPE {self.name}_bucket counter"
        yield from buckets

    def samples(self) -> Iterator[str]:
        """The quantiles."""
        recent = sorted(self._recent.copy()) or [0]
        for quantile in _QUANTILES:
            value = recent[round(quantile * (len(recent) - 1))]
            yield self._sample(value, "", extra=f'quantile="{quantile:g}"')


def _duration(description: str, label: Label = _NO_LABEL) -> Histogram:
    return Histogram(f"{description} (seconds)", _DURATION_BOUNDS, label)


def _tokens(description: str, max_tokens: int) -> Histogram:
    return Histogram(description, [max_tokens / 100 * step for step in range(1, 101)])


class Metrics:
    """Every series of the router, all present from the start, by their names without `tgi_`.

    Changed from the event loop only, read (`render`) from any thread.
    """

    def __init__(self, max_input_tokens: int, max_total_tokens: int, num_shards: int = 1) -> None:
        self.request_count = Counter("Requests that arrived")
        self.request_success = Counter("Generations that were completed")
        self.request_failure = Counter("Requests that failed", _ERR)
        self.request_unauthorized = Counter("Requests without a valid API key")
        self.request_key_limit = Counter(
            "Requests refused because of a limit per API key", _KEY_LIMIT
        )
        self.request_preempted = Gauge(
            "Times a request gave its KV blocks back and was queued again", kind="counter"
        )
        self.request_duration = _duration("Arrival to end")
        self.request_validation_duration = _duration("Arrival to queued")
        self.request_queue_duration = _duration("Queued to batched")
        self.request_inference_duration = _duration("Batched to end")
        self.request_mean_time_per_token_duration = _duration("Inference time per generated token")
        self.request_time_to_first_token_duration = _duration("Queued to first token")
        self.request_inter_token_latency_duration = _duration(
            "One token to the next of its request"
        )
        self.request_generated_tokens = _tokens("Tokens generated per request", max_total_tokens)
        self.request_input_length = _tokens("Prompt tokens per request", max_input_tokens)
        self.request_max_new_tokens = _tokens("Tokens asked for per request", max_total_tokens)
        self.request_skipped_tokens = Summary(
            "Tokens gained by speculation per request and step",
            [float(n) for n in range(17)],
        )
        self.connections_refused = Counter("Connections that were refused or cut off", _REFUSED)
        self.restarts = Counter("Times a process that had ended was replaced", _PROCESS)
        self._add_batches(num_shards)
        # The usual metrics of a process: CPU, memory, file descriptors, start time.
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.log_lines_dropped = Gauge(
            "Log lines dropped because they were not read in time", kind="counter"
        )
        for name, metric in self._families():
            metric.name = f"tgi_{name}"

    def _add_batches(self, num_shards: int) -> None:
        """Metrics of the queue, the steps and the KV blocks."""
        self.queue_size = Gauge("Requests waiting for a place in the batch")
        self.batch_next_size = Histogram(
            "Requests admitted together", [float(n) for n in range(1, 1025)]
        )
        self.batch_current_size = Gauge("Requests running")
        self.batch_current_max_tokens = Gauge("Tokens that fit the KV blocks of running requests")
        self.batch_max_total_tokens = Gauge("Tokens that fit all KV blocks")
        self.batch_concat = Counter("Times new requests joined a running batch", _REASON)
        self.batch_inference_count = Counter("Steps sent to the shards", _METHOD)
        self.batch_inference_success = Counter("Steps that succeeded", _METHOD)
        self.batch_inference_failure = Counter("Steps that failed", _METHOD)
        self.batch_inference_duration = _duration("A step as the router sees it", _METHOD)
        self.batch_forward_duration = _duration("The forward passes of a step", _METHOD)
        self.batch_decode_duration = _duration("Sampling the tokens of a step", _METHOD)
        self.batch_filter_duration = _duration("Delivering a step and dropping ended rows", _METHOD)
        self.batch_concat_duration = _duration("Joining new requests to a batch", _JOINING)
        # With one shard the series would only repeat the step's duration.
        ranks = ("rank", tuple(map(str, range(num_shards))) if num_shards > 1 else ())
        self.batch_shard_duration = _duration("A step as each shard of several sees it", ranks)
        self.kv_blocks_used = Gauge("KV blocks held by requests")
        self.kv_blocks_free = Gauge("KV blocks that can be allocated")
        self.prefix_cache_blocks = Gauge("KV blocks in the prefix cache, in use or idle")
        self.prefix_cache_queried_tokens = Counter("Prompt tokens of all admitted requests")
        self.prefix_cache_hit_tokens = Counter("Prompt tokens found in the prefix cache")

    def _families(self) -> Iterator[tuple[str, _Metric]]:
        return ((name, item) for name, item in vars(self).items() if isinstance(item, _Metric))

    def render(self) -> bytes:
        """All series in Prometheus' text format (`CONTENT_TYPE`)."""
        lines = (line for _, family in self._families() for line in family.render())
        ours = "".join(f"{line}\n" for line in lines).encode()
        return ours + generate_latest(self._process)
