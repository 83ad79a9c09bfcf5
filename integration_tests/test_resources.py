"""The embedded model, as a newcomer starts it: how long it takes and what it holds.

The bounds are loose, for busy machines; benchmarks/start.py measures.
"""

import time

import pytest

from integration_tests.conftest import Launch

pytestmark = pytest.mark.timed

MAX_FIRST_TOKEN_S = 20.0
MAX_ROUTER_MB = 200.0
QUESTION = "What does textwrap.dedent do?"


def test_embedded_model_starts_soon_and_the_router_stays_small(launch: Launch) -> None:
    started = time.monotonic()
    handle = launch(None)
    handle.wait_until_ready()
    body = {"inputs": QUESTION, "parameters": {"max_new_tokens": 8}}
    with handle.client.stream("POST", "/generate_stream", json=body) as response:
        assert next(response.iter_lines()).startswith('data: {"index":1,')
    first_token_s = time.monotonic() - started
    for _ in range(20):
        handle.generate(QUESTION, max_new_tokens=8)
    router_mb = handle.child("text-generation-router").memory_info().rss / 1e6
    print(f"first token after {first_token_s:.1f} s, router {router_mb:.0f} MB")
    assert first_token_s < MAX_FIRST_TOKEN_S
    assert router_mb < MAX_ROUTER_MB
    handle.stop()
