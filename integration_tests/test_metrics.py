"""/metrics has TGI's names with TGI's types, and what TGI lacks."""

from integration_tests.server import LauncherHandle

DURATION = "histogram"
TYPES = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_preempted": "counter",
    "tgi_request_duration": DURATION,
    "tgi_request_validation_duration": DURATION,
    "tgi_request_queue_duration": DURATION,
    "tgi_request_inference_duration": DURATION,
    "tgi_request_mean_time_per_token_duration": DURATION,
    "tgi_request_time_to_first_token_duration": DURATION,
    "tgi_request_inter_token_latency_duration": DURATION,
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_skipped_tokens": "summary",
    "tgi_request_skipped_tokens_bucket": "counter",
    "tgi_queue_size": "gauge",
    "tgi_batch_next_size": "histogram",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_max_total_tokens": "gauge",
    "tgi_batch_concat": "counter",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_inference_failure": "counter",
    "tgi_batch_inference_duration": DURATION,
    "tgi_batch_forward_duration": DURATION,
    "tgi_batch_decode_duration": DURATION,
    "tgi_batch_filter_duration": DURATION,
    "tgi_batch_concat_duration": DURATION,
    "tgi_batch_shard_duration": DURATION,
    "tgi_kv_blocks_used": "gauge",
    "tgi_kv_blocks_free": "gauge",
    "tgi_prefix_cache_blocks": "gauge",
    "tgi_prefix_cache_queried_tokens": "counter",
    "tgi_prefix_cache_hit_tokens": "counter",
    "tgi_log_lines_dropped": "counter",
    "tgi_restarts": "counter",
    "tgi_connections_refused": "counter",
    "tgi_request_unauthorized": "counter",
    "tgi_request_key_limit": "counter",
}


def test_names_and_types(server: LauncherHandle) -> None:
    server.generate("the cat ", max_new_tokens=3)
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    words = [line.split() for line in response.text.splitlines() if line.startswith("# TYPE ")]
    kinds = {name: kind for _, _, name, kind in words}
    assert {name: kind for name, kind in kinds.items() if name.startswith("tgi_")} == TYPES


def test_a_request_is_counted(server: LauncherHandle) -> None:
    before = server.metrics()
    answer = server.generate("the cat ", max_new_tokens=7, ignore_eos_token=True)
    server.client.post("/generate", json={"inputs": "", "parameters": {}})
    server.assert_idle()
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert answer["details"]["generated_tokens"] == 7
    assert grown["tgi_request_count"] == 2
    assert grown["tgi_request_success"] == 1
    assert grown['tgi_request_failure{err="validation"}'] == 1
    assert grown["tgi_request_duration_count"] == 1
    assert grown["tgi_request_generated_tokens_sum"] == 7
    assert grown["tgi_request_time_to_first_token_duration_count"] == 1
    assert grown["tgi_request_inter_token_latency_duration_count"] == 6
    assert grown['tgi_batch_inference_count{method="prefill"}'] == 1
    assert grown['tgi_batch_inference_success{method="decode"}'] == 6
    assert grown['tgi_batch_forward_duration_count{method="decode"}'] == 6
    assert 0 < grown['tgi_batch_forward_duration_sum{method="decode"}'] < 60


def test_budget_and_blocks(server: LauncherHandle) -> None:
    info = server.client.get("/info").json()
    metrics = server.metrics()
    assert metrics["tgi_batch_max_total_tokens"] == info["max_batch_total_tokens"]
    assert metrics["tgi_kv_blocks_free"] == info["num_blocks"]
    assert info["num_blocks"] * info["block_size"] == info["max_batch_total_tokens"]
