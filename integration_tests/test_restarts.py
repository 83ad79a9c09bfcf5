"""Processes that end while the server serves are replaced: clients get their tokens or an error.

What the launcher does is tested with played children, in launcher/tests.
"""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, assert_ended, running, wait_until

pytestmark = pytest.mark.timed

NUM_RUNNING, NUM_QUEUED = 8, 8
NUM_CLIENTS = NUM_RUNNING + NUM_QUEUED
FLAGS = ("--max-batch-size", str(NUM_RUNNING))
# Enough that all run while the others come.
NUM_TOKENS = 500
# What the issue promises between an event and the error that it causes.
NOTICE_S = 2.0
# A server of the embedded model is there again.
AGAIN_S = 30.0
SHARD, ROUTER = "text-generation-server", "text-generation-router"

# What depends on more than the last token.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "top_n_tokens": 2},
    {"grammar": {"type": "regex", "value": "([a-z]{1,9} ){200,600}"}},
    {"frequency_penalty": 0.5, "watermark": True},
)

Events = list[dict[str, Any]]


def read(handle: LauncherHandle, number: int, num_tokens: int = NUM_TOKENS) -> tuple[Events, float]:
    """The events of a client's stream, which is drawn, and when the last one came."""
    with httpx.Client(base_url=handle.url, timeout=60, trust_env=False) as client:
        events: Events = []
        asked = {"max_new_tokens": num_tokens, "ignore_eos_token": True, "do_sample": True}
        body = {
            "inputs": f"def function_{number}(",
            "parameters": asked | {"seed": number} | KINDS[number % len(KINDS)],
        }
        with client.stream("POST", "/generate_stream", json=body) as response:
            for line in response.iter_lines():
                if line.startswith(("data:", "{")):
                    events.append(json.loads(line.removeprefix("data:")))
    return events, time.monotonic()


def ids(events: Events) -> list[int]:
    """The tokens of a stream that has ended well."""
    assert "error" not in events[-1], events[-1]
    return [event["token"]["id"] for event in events]


@contextmanager
def clients(handle: LauncherHandle) -> Iterator[list[Future[tuple[Events, float]]]]:
    """Inside the block as many run as can, all of which have tokens, and the others wait."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        came, first = "tgi_request_count", "tgi_request_time_to_first_token_duration_count"
        before = handle.metrics()
        asked = [pool.submit(read, handle, number) for number in range(NUM_RUNNING)]

        def num(name: str) -> float:
            return handle.metrics()[name] - before[name]

        # A request that has come can still wait for its grammar; one with a token has a row.
        wait_until(lambda: num(first) >= NUM_RUNNING, 20, "as many as can have tokens")
        asked += [pool.submit(read, handle, n) for n in range(NUM_RUNNING, NUM_CLIENTS)]
        wait_until(lambda: num(came) >= NUM_CLIENTS, 20, "the others came")
        wait_until(lambda: handle.metrics()["tgi_queue_size"] == NUM_QUEUED, 20, "they wait")
        assert handle.metrics()["tgi_batch_current_size"] == NUM_RUNNING, "one has ended"
        yield asked


def expected(handle: LauncherHandle) -> list[list[int]]:
    """What all of them get of a server that nothing happens to."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        found = pool.map(lambda number: read(handle, number), range(NUM_CLIENTS))
        return [ids(events) for events, _ in found]


def restarts(handle: LauncherHandle) -> tuple[float, float]:
    """How often shards and router were replaced, as the metrics say."""
    metrics = handle.metrics()
    return tuple(metrics[f'tgi_restarts{{process="{name}"}}'] for name in ("shard", "router"))


@contextmanager
def ready_again(handle: LauncherHandle) -> Iterator[None]:
    """After the block the launcher has said once more that it is ready, and it is idle."""
    said = "text_generation_launcher: Ready again after"
    before = handle.log.count(said)
    yield
    wait_until(lambda: handle.log.count(said) > before, AGAIN_S, "it is ready again")
    handle.wait_until_ready()
    handle.assert_idle()


def num_descriptors(handle: LauncherHandle) -> list[int]:
    """Of the launcher and the router."""
    processes = psutil.Process(handle.process.pid), handle.child(ROUTER)
    return [process.num_fds() for process in processes]


@pytest.fixture(scope="module")
def served() -> Iterator[LauncherHandle]:
    """Its processes are replaced by one test after the other: at most 5 times in 10 minutes."""
    with running(None, *FLAGS) as handle:
        yield handle


@pytest.fixture(scope="module")
def tokens(served: LauncherHandle) -> list[list[int]]:
    """What the clients get when nothing happens."""
    return expected(served)


def test_a_shard_that_is_killed_costs_a_pause(
    served: LauncherHandle, tokens: list[list[int]]
) -> None:
    grammar = {"type": "regex", "value": "[a-c]{3}"}
    before, router = num_descriptors(served), served.child(ROUTER)
    for times in (1, 2):
        with ready_again(served):
            with clients(served) as asked, ThreadPoolExecutor(1) as pool:
                shard = served.child(SHARD)
                shard.kill()
                wait_until(lambda: served.client.get("/health").status_code == 503, 1, "it says so")
                wait_until(
                    lambda: served.client.get("/readyz").json()["state"] == "degraded", 1, "so too"
                )
                assert served.client.get("/livez").status_code == 200
                other = pool.submit(served.generate, "x", max_new_tokens=10, grammar=grammar)
            assert [ids(one.result()[0]) for one in asked] == tokens
            assert re.fullmatch("[a-c]{3}", other.result()["generated_text"])
        assert restarts(served) == (times, 0)
        wait_until(lambda: served.client.get("/readyz").json()["state"] == "ready", 1, "ready")
    assert served.child(ROUTER) == router and served.child(SHARD) != shard
    wait_until(
        lambda: all(a <= b for a, b in zip(num_descriptors(served), before, strict=True)),
        5,
        f"no descriptors were left: {before}",
    )
    log = served.log
    assert "shard 0 was killed by signal 9" in log
    assert "shard 0 is replaced (2 of 5 in 10 minutes)" in log


def test_a_shard_that_hangs_is_replaced(served: LauncherHandle, tokens: list[list[int]]) -> None:
    with ready_again(served):
        with clients(served) as asked:
            served.child(SHARD).suspend()
        assert [ids(one.result()[0]) for one in asked] == tokens
    log = served.log
    assert "the router has declared the shards lost: " in log
    assert "(shard 0 is stopped, as by SIGSTOP)" in log


def test_a_router_that_is_killed_is_replaced(
    served: LauncherHandle, tokens: list[list[int]]
) -> None:
    shard = served.child(SHARD)
    with ready_again(served):
        with clients(served) as asked:
            began = time.monotonic()
            served.child(ROUTER).kill()
        for one in asked:
            with pytest.raises(httpx.TransportError):
                one.result()
        assert time.monotonic() - began < NOTICE_S
    assert served.child(SHARD) == shard
    assert restarts(served)[1] == 1
    assert [ids(read(served, n)[0]) for n in range(2)] == tokens[:2]
    assert "the router is replaced (1 of 5 in 10 minutes)" in served.log
    # A shard while a new router has hardly begun.
    with ready_again(served):
        served.child(ROUTER).kill()
        wait_until(lambda: "the router is replaced (2 of 5" in served.log, 10, "it begins")
        shard.kill()
    assert ids(read(served, 1)[0]) == tokens[1]


def test_a_router_that_is_stopped_is_replaced(served: LauncherHandle) -> None:
    shard = served.child(SHARD)
    with ready_again(served):
        served.child(ROUTER).suspend()
    assert served.child(SHARD) == shard
    assert "the router has not answered for 5 s (the router is stopped, as by" in served.log


def test_streams_that_are_not_resumed_are_told(tokens: list[list[int]]) -> None:
    """Whole answers are computed again."""
    with running(None, *FLAGS, "--resume-streams", "false") as handle:
        sampling = {
            "do_sample": True,
            "seed": 4,
            "ignore_eos_token": True,
            "max_new_tokens": NUM_TOKENS,
        }
        with clients(handle) as asked, ThreadPoolExecutor(1) as pool:
            whole = pool.submit(handle.generate, "def function_4(", **sampling)
            began = time.monotonic()
            handle.child(SHARD).kill()
        for one in asked[:NUM_RUNNING]:
            events, at = one.result()
            assert events[-1]["error_type"] == "generation", events[-1]
            assert at - began < NOTICE_S
        assert [ids(one.result()[0]) for one in asked[NUM_RUNNING:]] == tokens[NUM_RUNNING:]
        assert [token["id"] for token in whole.result()["details"]["tokens"]] == tokens[4]
        with ready_again(handle), ThreadPoolExecutor(1) as pool:
            whole = pool.submit(handle.generate, "def function_4(", **sampling)
            wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 1, 20, "it computes")
            handle.child(SHARD).kill()
            assert [token["id"] for token in whole.result()["details"]["tokens"]] == tokens[4]


def rank(handle: LauncherHandle, number: int) -> psutil.Process:
    """The process of a rank."""
    [found] = [p for p in handle.family() if f"--rank={number}" in p.cmdline()]
    return found


@pytest.mark.parametrize(
    ("victim", "end"),
    [
        (1, psutil.Process.kill),
        pytest.param(0, psutil.Process.suspend, marks=pytest.mark.nightly),
    ],
    ids=["killed", "stopped"],
)
def test_all_ranks_are_replaced_when_one_is_killed_or_stopped(
    victim: int, end: Callable[[psutil.Process], None]
) -> None:
    with running(None, *FLAGS, "--num-shard", "2", "--step-deadline", "2") as handle:
        alone = expected(handle)
        both = [rank(handle, number) for number in range(2)]
        with ready_again(handle):
            with clients(handle) as asked:
                end(both[victim])
            assert [ids(one.result()[0]) for one in asked] == alone
        assert not any(process.is_running() for process in both)
        assert "all shards are replaced (1 of 5 in 10 minutes)" in handle.log


def test_a_stop_while_a_shard_is_replaced(launch: Launch) -> None:
    handle = launch(None, *FLAGS)
    handle.wait_until_ready()
    family = handle.family()
    with clients(handle) as asked:
        handle.child(SHARD).kill()
        wait_until(lambda: "replaced (1 of 5" in handle.log, 10, "it is being replaced")
        family += handle.family()
        began = time.monotonic()
        handle.process.send_signal(signal.SIGTERM)
        assert handle.wait_for_exit(20) == 0
        assert time.monotonic() - began < 5
    for one in asked:
        assert one.result()[0][-1]["error_type"].startswith("incomplete_generation")
    assert_ended(family, within_s=5)
    assert not list(handle.uds_path.parent.glob("shard-[0-9]"))
