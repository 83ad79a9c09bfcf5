"""The page that Prometheus reads, as Prometheus reads it. Integration tests have all its names."""

import math

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from text_generation_router.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(150, 200, num_shards=2)


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


def buckets(metrics: Metrics, name: str) -> dict[float, float]:
    samples = families(metrics)[name].samples
    return {float(each.labels["le"]): each.value for each in samples if "le" in each.labels}


def test_no_name_ends_as_prometheus_clients_own_do(metrics: Metrics) -> None:
    page = metrics.render().decode()
    declared = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE tgi_")}
    assert declared == {name for name in families(metrics) if not name.startswith("process_")}
    assert page.count("# HELP tgi_") == len(declared) > 35
    assert "\nprocess_resident_memory_bytes " in page and "_total{" not in page


def test_counters(metrics: Metrics) -> None:
    assert value(metrics, "tgi_request_failure", err="dropped") == 0
    metrics.request_count.inc()
    metrics.request_count.inc(4)
    metrics.request_failure.inc(err="validation")
    assert value(metrics, "tgi_request_count") == metrics.request_count.value() == 5
    assert value(metrics, "tgi_request_failure", err="validation") == 1
    for label in ({}, {"err": "no such word"}, {"method": "decode"}):
        with pytest.raises(KeyError):
            metrics.request_failure.inc(**label)


def test_gauges(metrics: Metrics) -> None:
    metrics.queue_size.read = [3, 3].pop
    assert value(metrics, "tgi_queue_size") == metrics.queue_size.value == 3


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    metrics = Metrics(100, 200)
    for tokens in (1, 2, 2.5, 99, 100, 101):
        metrics.request_input_length.observe(tokens)
    counted = buckets(metrics, "tgi_request_input_length")
    assert [counted[le] for le in (1, 2, 3, 98, 99, 100, math.inf)] == [1, 2, 3, 3, 4, 5, 6]
    assert value(metrics, "tgi_request_input_length_count") == 6
    assert value(metrics, "tgi_request_input_length_sum") == 305.5


def test_each_label_has_its_own_histogram_and_one_shard_has_no_ranks(metrics: Metrics) -> None:
    metrics.batch_shard_duration.observe(0.01, rank="1")
    assert value(metrics, "tgi_batch_shard_duration_count", rank="1") == 1
    assert value(metrics, "tgi_batch_shard_duration_count", rank="0") == 0
    assert families(Metrics(100, 200))["tgi_batch_shard_duration"].samples == []


def test_durations_are_bucketed_as_tgi_does(metrics: Metrics) -> None:
    for name in families(metrics):
        if name.endswith("duration"):
            limits = sorted(buckets(metrics, name))
            assert len(limits) == 36 and limits[-1] == math.inf
            assert limits[0] == pytest.approx(0.00015)
            assert limits[34] == pytest.approx(145.6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "first", "last", "num"),
    [
        ("tgi_request_input_length", 1.5, 150, 100),
        ("tgi_request_generated_tokens", 2, 200, 100),
        ("tgi_batch_next_size", 1, 1024, 1024),
    ],
)
def test_sizes_are_bucketed_as_tgi_does(
    metrics: Metrics, name: str, first: float, last: float, num: int
) -> None:
    limits = sorted(buckets(metrics, name))
    assert (limits[0], limits[-2], len(limits) - 1) == (first, last, num)


def test_a_summary_has_quantiles_and_buckets(metrics: Metrics) -> None:
    name = "tgi_request_skipped_tokens"
    assert value(metrics, name, quantile="0.5") == 0
    for number in range(2001):
        metrics.request_skipped_tokens.observe(number)
    assert value(metrics, f"{name}_count") == 2001
    assert value(metrics, f"{name}_sum") == 2001 * 1000
    # Of the last 1024.
    for quantile, expected in (("0", 977), ("0.5", 1489), ("0.999", 1999), ("1", 2000)):
        assert value(metrics, name, quantile=quantile) == expected
    metrics.request_skipped_tokens.observe(1, times=3)
    for le, expected in (("0.0", 1), ("1.0", 5), ("16.0", 20), ("+Inf", 2004)):
        assert value(metrics, f"{name}_bucket", le=le) == expected
