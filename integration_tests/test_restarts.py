"""Processes that end while the server serves are replaced: clients get their tokens or an error."""

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
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
# What the issue promises between an event and the error that it causes.
NOTICE_S = 2.0
# A server of the embedded model is there again.
AGAIN_S = 30.0
SHARD, ROUTER = "text-generation-server", "text-generation-router"

# What depends on more than the last token.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "top_n_tokens": 2},
    {"grammar": {"type": "regex", "value": "([a-z]{1,9} ){300,900}"}},
    {"frequency_penalty": 0.5, "watermark": True},
)

Events = list[dict[str, Any]]


def read(handle: LauncherHandle, number: int, num_tokens: int = 800) -> tuple[Events, float]:
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


def wait_until_ready_again(handle: LauncherHandle, times: int = 1) -> None:
    """Until the launcher has said so so often."""
    said = "text_generation_launcher: Ready again after"
    wait_until(lambda: handle.log.count(said) >= times, AGAIN_S, "it is ready again")
    handle.wait_until_ready()


def assert_nothing_left(handle: LauncherHandle, before: Sequence[psutil.Process]) -> None:
    """After its end: no process that it ever had, no socket."""
    assert_ended(before, within_s=5)
    assert not list(handle.uds_path.parent.glob("shard-[0-9]"))


def num_descriptors(handle: LauncherHandle) -> list[int]:
    """Of the launcher and the router."""
    processes = psutil.Process(handle.process.pid), handle.child(ROUTER)
    return [process.num_fds() for process in processes]


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    """What the clients get when nothing happens."""
    with running(None, *FLAGS) as handle:
        return expected(handle)


def test_a_shard_that_is_killed_costs_a_pause(tokens: list[list[int]]) -> None:
    with running(None, *FLAGS) as handle:
        read(handle, 0, 4)
        before, router = num_descriptors(handle), handle.child(ROUTER)
        for times in (1, 2):
            with clients(handle) as asked:
                shard = handle.child(SHARD)
                shard.kill()
                wait_until(lambda: handle.client.get("/health").status_code == 503, 1, "it says so")
                wait_until(
                    lambda: handle.client.get("/readyz").json()["state"] == "degraded", 1, "so too"
                )
                assert handle.client.get("/livez").status_code == 200
            assert [ids(one.result()[0]) for one in asked] == tokens
            wait_until_ready_again(handle, times)
            assert restarts(handle) == (times, 0)
            wait_until(lambda: handle.client.get("/readyz").json()["state"] == "ready", 1, "ready")
            handle.assert_idle()
        assert handle.child(ROUTER) == router and handle.child(SHARD) != shard
        wait_until(
            lambda: all(a <= b for a, b in zip(num_descriptors(handle), before, strict=True)),
            5,
            f"no descriptors were left: {before}",
        )
        log = handle.log
        assert "shard 0 was killed by signal 9" in log
        assert "shard 0 is replaced (2 of 5 in 10 minutes)" in log


def test_streams_that_are_not_resumed_are_told(tokens: list[list[int]]) -> None:
    with running(None, *FLAGS, "--resume-streams", "false") as handle:
        with clients(handle) as asked, ThreadPoolExecutor(1) as pool:
            whole = pool.submit(handle.generate, "def whole(", max_new_tokens=5)
            began = time.monotonic()
            handle.child(SHARD).kill()
        for one in asked[:NUM_RUNNING]:
            events, at = one.result()
            assert events[-1]["error_type"] == "generation", events[-1]
            assert at - began < NOTICE_S
        assert [ids(one.result()[0]) for one in asked[NUM_RUNNING:]] == tokens[NUM_RUNNING:]
        assert whole.result()["details"]["generated_tokens"] == 5
        handle.assert_idle()


def test_whole_answers_are_computed_again(tokens: list[list[int]]) -> None:
    with (
        running(None, *FLAGS, "--resume-streams", "false") as handle,
        ThreadPoolExecutor(2) as pool,
    ):
        sampling = {"do_sample": True, "seed": 4, "ignore_eos_token": True, "max_new_tokens": 800}
        whole = pool.submit(handle.generate, "def function_4(", **sampling)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "model": "x"}
        said = pool.submit(handle.client.post, "/v1/chat/completions", json=chat)
        wait_until(lambda: handle.metrics()["tgi_batch_current_size"] >= 1, 20, "it computes")
        time.sleep(0.1)
        handle.child(SHARD).kill()
        assert [token["id"] for token in whole.result()["details"]["tokens"]] == tokens[4]
        assert said.result().status_code in (200, 422)  # the model has no template, or has
        assert restarts(handle)[0] == 1


def test_a_grammar_asked_for_meanwhile_waits() -> None:
    with running(None) as handle:
        handle.child(SHARD).kill()
        grammar = {"type": "regex", "value": "[a-c]{3}"}
        answer = handle.generate("x", max_new_tokens=10, grammar=grammar)
        assert re.fullmatch("[a-c]{3}", answer["generated_text"])


def test_a_router_that_is_killed_is_replaced(tokens: list[list[int]]) -> None:
    with running(None, *FLAGS) as handle:
        shard = handle.child(SHARD)
        with clients(handle) as asked:
            began = time.monotonic()
            handle.child(ROUTER).kill()
        for one in asked:
            with pytest.raises(httpx.TransportError):
                one.result()
        assert time.monotonic() - began < NOTICE_S
        wait_until_ready_again(handle)
        assert handle.child(SHARD) == shard
        assert restarts(handle) == (0, 1)
        assert [ids(read(handle, n)[0]) for n in range(2)] == tokens[:2]
        handle.assert_idle()
        assert "the router is replaced (1 of 5 in 10 minutes)" in handle.log


def test_both_are_replaced(tokens: list[list[int]]) -> None:
    with running(None, *FLAGS) as handle:
        for process in (handle.child(SHARD), handle.child(ROUTER)):
            process.kill()
        wait_until_ready_again(handle)
        assert ids(read(handle, 0)[0]) == tokens[0]
        # And a shard while a new router has hardly begun.
        handle.child(ROUTER).kill()
        wait_until(lambda: "the router is replaced (2 of 5" in handle.log, 10, "it begins")
        handle.child(SHARD).kill()
        wait_until_ready_again(handle, 2)
        assert ids(read(handle, 1)[0]) == tokens[1]
        handle.assert_idle()


def test_a_router_that_is_stopped_is_replaced() -> None:
    with running(None) as handle:
        shard = handle.child(SHARD)
        time.sleep(1.5)
        began = time.monotonic()
        handle.child(ROUTER).suspend()
        said = "the router has not answered for 5 s (the router is stopped, as by SIGSTOP"
        wait_until(lambda: said in handle.log, 8, "the launcher has noticed it")
        assert 3.5 < time.monotonic() - began < 6.5
        wait_until_ready_again(handle)
        assert handle.child(SHARD) == shard
        handle.generate("x", max_new_tokens=3)


def test_a_launcher_that_was_stopped_replaces_nothing() -> None:
    with running(None) as handle:
        router = handle.child(ROUTER)
        launcher = psutil.Process(handle.process.pid)
        for processes in ([launcher], [launcher, router]):
            for process in processes:
                process.suspend()
            time.sleep(7)
            for process in processes:
                process.resume()
            time.sleep(1)
            handle.generate("x", max_new_tokens=3)
        assert handle.child(ROUTER) == router


def rank(handle: LauncherHandle, number: int) -> psutil.Process:
    """The process of a rank."""
    [found] = [p for p in handle.family() if f"--rank={number}" in p.cmdline()]
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_are_replaced(victim: int, tokens: list[list[int]]) -> None:
    with running(None, *FLAGS, "--num-shard", "2", "--step-deadline", "2") as handle:
        alone = expected(handle)
        both = [rank(handle, number) for number in range(2)]
        with clients(handle) as asked:
            both[victim].kill()
        assert [ids(one.result()[0]) for one in asked] == alone
        wait_until_ready_again(handle)
        assert not any(process.is_running() for process in both)
        assert "all shards are replaced (1 of 5 in 10 minutes)" in handle.log
        handle.assert_idle()


def test_a_rank_that_is_stopped_has_all_replaced() -> None:
    with running(None, *FLAGS, "--num-shard", "2", "--step-deadline", "2") as handle:
        alone = expected(handle)
        with clients(handle) as asked:
            rank(handle, 1).suspend()
        assert [ids(one.result()[0]) for one in asked] == alone
        wait_until_ready_again(handle)
        handle.assert_idle()


def test_a_shard_that_hangs_is_replaced(tokens: list[list[int]]) -> None:
    with running(None, *FLAGS) as handle:
        with clients(handle) as asked:
            handle.child(SHARD).suspend()
        assert [ids(one.result()[0]) for one in asked] == tokens
        wait_until_ready_again(handle)
        log = handle.log
        assert "the router has declared the shards lost: " in log
        assert "(shard 0 is stopped, as by SIGSTOP)" in log
        handle.assert_idle()


def test_too_many_ends_are_the_end(launch: Launch) -> None:
    handle = launch(None)
    handle.wait_until_ready()
    family = handle.family()
    for times in range(1, 7):
        shard = handle.child(SHARD)
        family += handle.family()
        shard.kill()
        if times < 6:
            wait_until_ready_again(handle, times)
    assert handle.wait_for_exit(30) == 1
    assert "shard 0 is not replaced again: the limit is 5 times in 10 minutes" in handle.log
    assert "shard 0 was killed by signal 9" in handle.log.rpartition(" ERROR ")[2]
    assert_nothing_left(handle, family)


def test_a_model_that_is_gone_is_the_end(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    """A start that fails is tried again with pauses, and its sentence is the last one."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    handle = launch(model, "--device", "cpu")
    handle.wait_until_ready()
    (model / "config.json").unlink()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(read, handle, 0, 200)
        handle.child(SHARD).kill()
        assert handle.wait_for_exit(60) == 1
        events, _ = asked.result()
        assert "error" in events[-1]
    assert "config.json" in handle.log.rpartition(" ERROR ")[2]


@pytest.mark.parametrize("name", [SHARD, ROUTER])
def test_no_restart_is_the_end(name: str, launch: Launch) -> None:
    handle = launch(None, *FLAGS, "--no-restart")
    handle.wait_until_ready()
    family = handle.family()
    with clients(handle) as asked:
        began = time.monotonic()
        handle.child(name).kill()
        assert handle.wait_for_exit(30) == 1
    for one in asked:
        if name == SHARD:
            events, at = one.result()
            assert events[-1]["error_type"] in ("generation", "incomplete_generation")
            assert at - began < NOTICE_S
        else:
            with pytest.raises(httpx.TransportError):
                one.result()
    assert_nothing_left(handle, family)


def test_a_router_that_is_stopped_is_the_end_with_no_restart(launch: Launch) -> None:
    """Unless it goes on before the limit."""
    handle = launch(None, *FLAGS, "--no-restart")
    handle.wait_until_ready()
    family, router = handle.family(), handle.child(ROUTER)
    router.suspend()
    time.sleep(3)
    router.resume()
    handle.generate("x", max_new_tokens=3)
    with clients(handle) as asked:
        began = time.monotonic()
        router.suspend()
        assert handle.wait_for_exit(30) == 1
    for one in asked:
        assert isinstance(one.exception(), httpx.TransportError)
    assert time.monotonic() - began < 5 + NOTICE_S
    said = "the router has not answered for 5 s (the router is stopped, as by SIGSTOP)"
    assert handle.log.rpartition(" ERROR text_generation_launcher: ")[2].strip() == said
    assert_nothing_left(handle, family)


@pytest.mark.parametrize("name", [SHARD, ROUTER])
def test_a_stop_while_something_is_replaced(name: str, launch: Launch) -> None:
    handle = launch(None, *FLAGS)
    handle.wait_until_ready()
    family = handle.family()
    with clients(handle) as asked:
        handle.child(name).kill()
        wait_until(lambda: "replaced (1 of 5" in handle.log, 10, "it is being replaced")
        family += handle.family()
        began = time.monotonic()
        handle.process.send_signal(signal.SIGTERM)
        assert handle.wait_for_exit(20) == 0
        assert time.monotonic() - began < 5
    for one in asked:
        if name == SHARD:
            assert one.result()[0][-1]["error_type"].startswith("incomplete_generation")
        else:
            assert isinstance(one.exception(), httpx.TransportError)
    assert_nothing_left(handle, family)


def test_the_launchers_end_is_that_of_all(launch: Launch) -> None:
    handle = launch(None)
    handle.wait_until_ready()
    family = handle.family()
    handle.process.kill()
    assert_ended(family, within_s=5)


def test_new_shards_that_hang_are_replaced_too() -> None:
    """Stopped as soon as they listen."""
    with running(None, "--step-deadline", "3") as handle:
        old = handle.child(SHARD)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(read, handle, 0, 400)
            wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 1, 20, "it runs")
            old.kill()
            said = "text_generation_shard: Server started at"
            wait_until(lambda: handle.log.count(said) == 2, AGAIN_S, "they listen")
            handle.child(SHARD).suspend()
            assert len(ids(asked.result(60)[0])) == 400
        wait_until_ready_again(handle)
        assert "the router has declared the shards lost: " in handle.log
