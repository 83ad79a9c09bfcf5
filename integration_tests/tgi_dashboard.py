"""The queries of TGI's dashboard (assets/tgi_grafana.json), by panel title.

TGI selects a server by the label `container`; here by the labels of docker/prometheus.yml.
"""

_CHOSEN = 'container="pytgi"'
_QUANTILES = (0.5, 0.9, 0.99)


def _quantile(quantile: float, metric: str, label: str = "") -> str:
    chosen = f"{label}{_CHOSEN}"
    return f"histogram_quantile({quantile}, sum by (le) (rate({metric}_bucket{{{chosen}}}[10m])))"


def _quantiles(metric: str, label: str = "") -> list[str]:
    return [_quantile(quantile, metric, label) for quantile in _QUANTILES]


def _heatmap(metric: str, label: str = "") -> list[str]:
    return [f"sum(increase({metric}_bucket{{{label}{_CHOSEN}}}[5m])) by (le)"]


def _median_ms(metric: str, label: str = "") -> str:
    return f"({_quantile(0.5, metric, label)} * 1000) > 0"


def _increase(metric: str, label: str) -> str:
    return f"sum(increase({metric}{{{_CHOSEN}}}[1m])) by ({label})"


_PREFILL = 'method="prefill", '
_DECODE = 'method="decode", '
_TOKENS = "tgi_request_generated_tokens"
_THROUGHPUT = f"rate({_TOKENS}_sum{{{_CHOSEN}}}[10m]) / rate({_TOKENS}_count{{{_CHOSEN}}}[10m])"

PANELS = {
    "Time to first token": [
        _median_ms("tgi_request_queue_duration"),
        _median_ms("tgi_batch_inference_duration", _PREFILL),
    ],
    "Decode per-token latency": [_median_ms("tgi_batch_forward_duration", _DECODE)],
    "Throughput (generated tok/s)": [f"sum(({_THROUGHPUT})>0)"],
    "Number of tokens per prompt": _quantiles("tgi_request_input_length"),
    "Number of generated tokens per request": _quantiles("tgi_request_generated_tokens"),
    "Requests": [
        f"sum(increase(tgi_request_success{{{_CHOSEN}}}[1m]))",
        _increase("tgi_request_failure", "err"),
    ],
    "Mean Time Per Token quantiles": _quantiles("tgi_request_mean_time_per_token_duration"),
    "Mean Time Per Token": _heatmap("tgi_request_mean_time_per_token_duration"),
    "Number of replicas": [f"count(tgi_request_count{{{_CHOSEN}}})"],
    "Queue Size": [f"sum(tgi_queue_size{{{_CHOSEN}}})"],
    "Max tokens per batch": [f"avg(tgi_batch_current_max_tokens{{{_CHOSEN}}})"],
    "Speculated Tokens": _quantiles("tgi_request_skipped_tokens"),
    "Prompt Tokens": _quantiles("tgi_request_input_length"),
    "Latency quantiles": _quantiles("tgi_request_duration"),
    "Batch Size": [f"avg(tgi_batch_current_size{{{_CHOSEN}}})"],
    "Concatenates": [_increase("tgi_batch_concat", "reason")],
    "Queue quantiles": _quantiles("tgi_request_queue_duration"),
    "Prefill Quantiles": _quantiles("tgi_batch_inference_duration", _PREFILL),
    "Prefill Latency": _heatmap("tgi_batch_inference_duration", _PREFILL),
    "Decode quantiles": _quantiles("tgi_batch_inference_duration", _DECODE),
    "Decode Latency": _heatmap("tgi_batch_inference_duration", _DECODE),
    "Forward quantiles": _quantiles("tgi_batch_forward_duration", _DECODE),
    "Forward Latency": _heatmap("tgi_batch_forward_duration", _DECODE),
    "Token Decode quantiles": _quantiles("tgi_batch_decode_duration", _DECODE),
    "Token Decode Latency": _heatmap("tgi_batch_decode_duration", _DECODE),
    "Filter Batch quantiles": _quantiles("tgi_batch_filter_duration", _DECODE),
    "Filter Batch Latency": _heatmap("tgi_batch_filter_duration", _DECODE),
    "Batch Concat quantiles": _quantiles("tgi_batch_concat_duration", _DECODE),
    "Batch Concat latency": _heatmap("tgi_batch_concat_duration", _DECODE),
}
