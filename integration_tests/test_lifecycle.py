"""How a server starts and ends: in order, with a reason, and without leaving a process."""

import json
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, assert_ended, free_port, wait_until

PROMPT = "the cat sat on "
LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos_token": True}
# Of a server that is to stop.
PROBES = {"/health": 503, "/livez": 200, "/readyz": 503, "/startupz": 200}


def ready(launch: Launch, model: Path | None, *flags: str, **environment: str) -> LauncherHandle:
    """A launcher that serves."""
    handle = launch(model, *flags, **environment)
    handle.wait_until_ready()
    return handle


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A process that gets no processor inside the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_launcher_is_killed(launch: Launch, tiny_model_path: Path) -> None:
    handle = ready(launch, tiny_model_path)
    family = handle.family()
    assert len(family) >= 2
    handle.process.kill()
    assert_ended(family)
    # Its leftovers do not disturb the next server.
    again = ready(launch, tiny_model_path, "--shard-uds-path", str(handle.uds_path))
    assert again.generate(PROMPT, max_new_tokens=2)["generated_text"]
    again.stop()


def test_a_running_stream_is_finished(launch: Launch, tiny_model_path: Path) -> None:
    handle = ready(launch, tiny_model_path)
    with ThreadPoolExecutor() as pool:
        with stopped(handle.child("text-generation-server")):  # so that it goes on running
            stream = pool.submit(handle.stream, PROMPT, **LONG)
            wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 1, 20, "it runs")
            handle.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "running requests" in handle.log, 10, "it is to stop")
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
            for path in ("/generate", "/generate_stream"):
                assert handle.client.post(path, json=body).status_code == 503
            for path, code in PROBES.items():
                assert handle.client.get(path).status_code == code
            assert handle.client.get("/readyz").json()["state"] == "draining"
            assert handle.metrics()["tgi_batch_current_size"] == 1
        events = stream.result(60)
    assert len(events) == LONG["max_new_tokens"]
    assert events[-1]["details"]["finish_reason"] == "length"
    assert handle.wait_for_exit() == 0
    with pytest.raises(httpx.TransportError):
        handle.client.get("/health")


def test_a_second_signal_while_nothing_runs(launch: Launch, tiny_model_path: Path) -> None:
    handle = ready(launch, tiny_model_path)
    handle.generate(PROMPT, max_new_tokens=2)
    handle.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM" in handle.log, 10, "the first signal is noticed")
    handle.process.send_signal(signal.SIGTERM)
    handle.wait_for_exit(10)
    assert "Traceback" not in handle.log
    assert "Cancel 0 running task(s)" not in handle.log


def test_stopped_while_it_starts(launch: Launch, tiny_model_path: Path) -> None:
    handle = launch(tiny_model_path)
    wait_until(lambda: bool(handle.family()), 20, "a child was started")
    family = handle.family()
    handle.process.send_signal(signal.SIGTERM)
    assert handle.wait_for_exit(20) == 0
    assert_ended(family)
    assert "Traceback" not in handle.log


def test_two_servers_beside_each_other(server: LauncherHandle, cramped: LauncherHandle) -> None:
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(one.stream, PROMPT, **LONG) for one in (server, cramped)]
        first, second = (answer.result(60) for answer in answers)
    assert [event["token"]["id"] for event in first] == [event["token"]["id"] for event in second]


def test_two_servers_that_start_at_once_on_one_port(launch: Launch, tiny_model_path: Path) -> None:
    port = str(free_port())
    both = [launch(tiny_model_path, "--port", port) for _ in range(2)]
    wait_until(lambda: any(one.process.poll() is not None for one in both), 30, "one ends")
    loser, winner = sorted(both, key=lambda one: one.process.poll() is None)
    assert loser.process.returncode == 1
    (line,) = [line for line in loser.log.splitlines() if " ERROR " in line]
    assert f"port {port} on 127.0.0.1 is already in use" in line
    wait_until(lambda: "Ready on" in winner.log, 90, "the other serves")
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    winner.stop()


def test_second_server_on_the_same_sockets(
    server: LauncherHandle, launch: Launch, tiny_model_path: Path
) -> None:
    other = launch(tiny_model_path, "--shard-uds-path", str(server.uds_path))
    assert other.wait_for_exit() == 1
    assert "another server uses the shard sockets" in other.log
    assert server.generate(PROMPT, max_new_tokens=2)["generated_text"]


def test_the_ready_line_says_what_to_try(server: LauncherHandle) -> None:
    (line,) = [line for line in server.log.splitlines() if "curl " in line]
    assert server.url in line
    command = shlex.split(line[line.index("curl ") :])
    data = command[command.index("-d") + 1]
    header = command[command.index("-H") + 1].split(": ")
    response = httpx.post(command[1], content=data, headers=[(header[0], header[1])], timeout=60)
    assert response.json()["generated_text"]


def test_environment_json_log_and_secrets(launch: Launch, tiny_model_path: Path) -> None:
    """No secret is in the log or on a command line, where other users of the machine can read."""
    environment = {"MODEL_ID": str(tiny_model_path), "JSON_OUTPUT": "true", "MAX_BEST_OF": "3"}
    flags = ("--max-stop-sequences", "7", "--api-key", "hunter2", "--api-key=hunter4")
    handle = ready(launch, None, *flags, **environment, HF_TOKEN="hf_hunter3")
    # The shard and the router, each with a worker: a server and a process that it has forked.
    wait_until(lambda: len(handle.family()) == 6, 10, "all children have been started")
    for process in (psutil.Process(handle.process.pid), *handle.family()):
        assert "hunter" not in " ".join(process.cmdline())
    for key, status in (("hunter2", 200), ("hunter4", 200), ("xxxxxxx", 401)):
        response = handle.client.get("/info", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status
        if status == 200:
            info = response.json()
            assert (info["max_best_of"], info["max_stop_sequences"]) == (3, 7)
            assert info["model_id"] == str(tiny_model_path)
    log = handle.stop()
    assert "hunter" not in log
    records = [json.loads(line) for line in log.splitlines()]
    assert {tuple(record) for record in records} == {("timestamp", "level", "target", "message")}
    targets = {record["target"].partition(".")[0] for record in records}
    assert targets >= {
        "text_generation_launcher",
        "text_generation_router",
        "text_generation_shard",
    }
