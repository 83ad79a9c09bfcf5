"""The page that Prometheus reads, as Prometheus reads it."""

import math

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from text_generation_router.metrics import Metrics

# Names and types of ../shared/tgi/batching.md section 8, then what TGI lacks.
FAMILIES = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_skipped_tokens": "summary",
    "tgi_queue_size": "gauge",
    "tgi_batch_next_size": "histogram",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_concat": "counter",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_inference_failure": "counter",
    "tgi_batch_inference_duration": "histogram",
    "tgi_batch_forward_duration": "histogram",
    "tgi_batch_decode_duration": "histogram",
    "tgi_batch_filter_duration": "histogram",
    "tgi_batch_concat_duration": "histogram",
    # A summary in TGI, but its dashboard queries buckets.
    "tgi_request_skipped_tokens_bucket": "counter",
    "tgi_batch_max_total_tokens": "gauge",
    "tgi_batch_shard_duration": "histogram",
    "tgi_request_preempted": "counter",
    "tgi_request_unauthorized": "counter",
    "tgi_request_key_limit": "counter",
    "tgi_request_time_to_first_token_duration": "histogram",
    "tgi_request_inter_token_latency_duration": "histogram",
    "tgi_kv_blocks_used": "gauge",
    "tgi_kv_blocks_free": "gauge",
    "tgi_prefix_cache_blocks": "gauge",
    "tgi_prefix_cache_queried_tokens": "counter",
    "tgi_prefix_cache_hit_tokens": "counter",
    "tgi_log_lines_dropped": "counter",
    "tgi_connections_refused": "counter",
    "tgi_restarts": "counter",
}


def families(metrics: Metrics) -> dict[str, Metric]:
    text = metrics.render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in families(metrics).values()
        for sample in family.samples
        # The parser gives counters the suffix that the page does not have.
        if sample.labels == labels and sample.name in (name, f"{name}_total")
    ]
    return found


def test_names_and_types_are_exact_from_the_start() -> None:
    metrics = Metrics(100, 200)
    lines = [line for line in metrics.render().decode().splitlines() if "process_" not in line]
    declared = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert declared == FAMILIES
    suffixes = ("", "_bucket", "_sum", "_count")
    known = {name + suffix for name in FAMILIES for suffix in suffixes}
    names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert names <= known
    assert sum(line.startswith("# HELP") for line in lines) == len(FAMILIES)
    # No name ends as prometheus_client's own counters do, and the parser agrees with the page.
    named = {name for name in families(metrics) if not name.startswith("process_")}
    assert named == FAMILIES.keys()


def test_the_process_is_described_as_by_every_prometheus_client() -> None:
    page = Metrics(100, 200).render().decode()
    assert "\nprocess_resident_memory_bytes " in page
    assert "\nprocess_open_fds " in page


def test_counters() -> None:
    metrics = Metrics(100, 200)
    assert value(metrics, "tgi_request_failure", err="dropped") == 0
    metrics.request_count.inc()
    metrics.request_count.inc(4)
    metrics.request_failure.inc(err="validation")
    assert value(metrics, "tgi_request_count") == metrics.request_count.value() == 5
    assert value(metrics, "tgi_request_failure", err="validation") == 1
    for label in ({}, {"err": "no such word"}, {"method": "decode"}):
        with pytest.raises(KeyError):
            metrics.request_failure.inc(**label)


def test_gauges() -> None:
    metrics = Metrics(100, 200)
    metrics.queue_size.set(7)
    metrics.queue_size.set(3)
    assert value(metrics, "tgi_queue_size") == metrics.queue_size.value == 3


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    metrics = Metrics(100, 200)
    for tokens in (1, 2, 2.5, 99, 100, 101):
        metrics.request_input_length.observe(tokens)
    counted = {
        sample.labels["le"]: sample.value
        for sample in families(metrics)["tgi_request_input_length"].samples
        if "le" in sample.labels
    }
    assert [counted[le] for le in ("1.0", "2.0", "3.0", "98.0", "99.0", "100.0", "+Inf")] == [
        1, 2, 3, 3, 4, 5, 6
    ]  # fmt: skip
    assert value(metrics, "tgi_request_input_length_count") == 6
    assert value(metrics, "tgi_request_input_length_sum") == 305.5


def test_a_label_has_its_own_histogram() -> None:
    metrics = Metrics(100, 200)
    metrics.batch_forward_duration.observe(0.01, method="decode")
    assert value(metrics, "tgi_batch_forward_duration_count", method="decode") == 1
    assert value(metrics, "tgi_batch_forward_duration_count", method="prefill") == 0


def test_one_shard_has_no_series_per_rank() -> None:
    assert families(Metrics(100, 200))["tgi_batch_shard_duration"].samples == []
    metrics = Metrics(100, 200, num_shards=2)
    assert value(metrics, "tgi_batch_shard_duration_count", rank="1") == 0
    metrics.batch_shard_duration.observe(0.01, rank="1")
    assert value(metrics, "tgi_batch_shard_duration_count", rank="1") == 1
    assert value(metrics, "tgi_batch_shard_duration_count", rank="0") == 0


def bounds(metrics: Metrics, name: str) -> list[float]:
    samples = families(metrics)[name].samples
    return sorted({float(sample.labels["le"]) for sample in samples if "le" in sample.labels})


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.endswith("duration")])
def test_durations_are_bucketed_as_tgi_does(name: str) -> None:
    limits = bounds(Metrics(100, 200, num_shards=2), name)
    assert len(limits) == 36 and limits[-1] == math.inf
    assert limits[0] == pytest.approx(0.00015) and limits[34] == pytest.approx(145.6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "first", "last", "num"),
    [
        ("tgi_request_input_length", 1.5, 150, 100),
        ("tgi_request_generated_tokens", 2, 200, 100),
        ("tgi_request_max_new_tokens", 2, 200, 100),
        ("tgi_batch_next_size", 1, 1024, 1024),
    ],
)
def test_sizes_are_bucketed_as_tgi_does(name: str, first: float, last: float, num: int) -> None:
    limits = bounds(Metrics(150, 200), name)
    assert (limits[0], limits[-2], len(limits) - 1) == (first, last, num)


def test_a_summary_has_quantiles() -> None:
    metrics = Metrics(100, 200)
    assert value(metrics, "tgi_request_skipped_tokens", quantile="0.5") == 0
    for number in range(2001):
        metrics.request_skipped_tokens.observe(number)
    assert value(metrics, "tgi_request_skipped_tokens_count") == 2001
    assert value(metrics, "tgi_request_skipped_tokens_sum") == 2001 * 1000
    # Of the last 1024.
    for quantile, expected in (("0", 977), ("0.5", 1489), ("0.999", 1999), ("1", 2000)):
        assert value(metrics, "tgi_request_skipped_tokens", quantile=quantile) == expected


def test_a_summary_counts_in_buckets_too() -> None:
    metrics = Metrics(100, 200)
    for skipped, times in ((0, 5), (1, 2), (16, 1), (17, 3)):
        metrics.request_skipped_tokens.observe(skipped, times)
    counted = {
        le: value(metrics, "tgi_request_skipped_tokens_bucket", le=le)
        for le in ("0.0", "1.0", "2.0", "15.0", "16.0", "+Inf")
    }
    assert list(counted.values()) == [5, 7, 7, 7, 8, 11]
    assert value(metrics, "tgi_request_skipped_tokens_count") == 11
