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
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos_token": True}


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


@pytest.mark.parametrize(
    ("script", "name"),
    [("text-generation-server", "shard 0"), ("text-generation-router", "router")],
)
def test_a_child_is_killed(launch: Launch, tiny_model_path: Path, script: str, name: str) -> None:
    handle = ready(launch, tiny_model_path, "--no-restart")
    family = handle.family()
    handle.child(script).send_signal(signal.SIGKILL)
    assert handle.wait_for_exit() == 1
    (error,) = [line for line in handle.log.splitlines() if " ERROR " in line]
    assert f"{name} was killed by signal 9" in error
    assert_ended(family)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_stream_is_finished(
    launch: Launch, tiny_model_path: Path, number: signal.Signals
) -> None:
    handle = ready(launch, tiny_model_path)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(handle.stream, PROMPT, **LONG)
        wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 1, 20, "it runs")
        with stopped(handle.child("text-generation-server")):  # so that it goes on running
            handle.process.send_signal(number)
            wait_until(lambda: "running requests" in handle.log, 10, "it is to stop")
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
            for path in ("/generate", "/generate_stream"):
                assert handle.client.post(path, json=body).status_code == 503
            assert handle.client.get("/health").status_code == 503
            assert handle.metrics()["tgi_batch_current_size"] == 1
        events = stream.result(60)
    assert len(events) == 400
    assert events[-1]["details"]["finish_reason"] == "length"
    assert handle.wait_for_exit() == 0
    with pytest.raises(httpx.TransportError):
        handle.client.get("/health")


@pytest.mark.timed
def test_a_shard_that_hangs(launch: Launch, tiny_model_path: Path) -> None:
    """Requests get an answer, and a supervisor sees the server end and can restart it."""
    handle = ready(launch, tiny_model_path, "--no-restart")
    family = handle.family()
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(handle.stream, PROMPT, **LONG)
        wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 1, 20, "it runs")
        shard = handle.child("text-generation-server")
        shard.send_signal(signal.SIGSTOP)
        unary = pool.submit(handle.client.post, "/generate", json={"inputs": PROMPT})
        *_, last = stream.result(40)
        assert last["error_type"] == "generation"
        assert "The shards have not finished a step within 5 s" in last["error"]
        assert unary.result(10).status_code == 424
    wait_until(lambda: "the router failed" in handle.log, 20, "the launcher has noticed")
    shard.send_signal(signal.SIGCONT)  # else it is killed, but only 2 s later
    assert handle.wait_for_exit(40) == 1
    # The router's last error lines follow: one, or that of the second request before it.
    error = handle.log.rpartition(" ERROR ")[2]
    assert error.startswith("text_generation_launcher: the router failed with exit code 1 while ")
    assert "The shards have not finished a step within 5 s; the server exits" in error
    assert_ended(family)


@pytest.mark.timed
def test_a_second_signal_ends_at_once(launch: Launch, tiny_model_path: Path) -> None:
    handle = ready(launch, tiny_model_path)
    family = handle.family()
    body = {"inputs": PROMPT, "parameters": LONG}
    with handle.client.stream("POST", "/generate_stream", json=body) as response:
        next(response.iter_lines())
        handle.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM" in handle.log, 10, "the first signal is noticed")
        handle.process.send_signal(signal.SIGTERM)
        handle.wait_for_exit(10)
    assert_ended(family)


@pytest.mark.timed
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


def test_two_servers_beside_each_other(
    server: LauncherHandle, launch: Launch, tiny_model_path: Path
) -> None:
    other = ready(launch, tiny_model_path, "--dtype", "float32")
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(one.stream, PROMPT, **LONG) for one in (server, other)]
        first, second = (answer.result(60) for answer in answers)
    assert [event["token"]["id"] for event in first] == [event["token"]["id"] for event in second]
    other.stop()


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


def test_environment_and_json_log(launch: Launch, tiny_model_path: Path) -> None:
    environment = {"MODEL_ID": str(tiny_model_path), "JSON_OUTPUT": "true", "MAX_BEST_OF": "3"}
    handle = ready(launch, None, "--max-stop-sequences", "7", **environment)
    info = handle.client.get("/info").json()
    assert (info["max_best_of"], info["max_stop_sequences"]) == (3, 7)
    assert info["model_id"] == str(tiny_model_path)
    log = handle.stop()
    records = [json.loads(line) for line in log.splitlines()]
    assert {tuple(record) for record in records} == {("timestamp", "level", "target", "message")}
    targets = {record["target"].partition(".")[0] for record in records}
    assert targets >= {
        "text_generation_launcher",
        "text_generation_router",
        "text_generation_shard",
    }


def test_the_ready_line_says_what_to_try(launch: Launch, tiny_model_path: Path) -> None:
    handle = ready(launch, tiny_model_path)
    wait_until(lambda: "curl " in handle.log, 10, "the ready line is printed")
    (line,) = [line for line in handle.log.splitlines() if "curl " in line]
    assert handle.url in line
    command = shlex.split(line[line.index("curl ") :])
    data = command[command.index("-d") + 1]
    header = command[command.index("-H") + 1].split(": ")
    response = httpx.post(command[1], content=data, headers=[(header[0], header[1])], timeout=60)
    assert response.json()["generated_text"]
    handle.stop()


def test_secrets_stay_out_of_the_log_and_of_command_lines(
    launch: Launch, tiny_model_path: Path
) -> None:
    """Nor can other users of the machine read them from a command line."""
    keys = ("--api-key", "hunter2", "--api-key=hunter4")
    handle = ready(launch, tiny_model_path, *keys, HF_TOKEN="hf_hunter3")
    # The shard, the router, what renders chats and what tries grammars.
    wait_until(lambda: len(handle.family()) == 4, 10, "all children have been started")
    processes = [psutil.Process(handle.process.pid), *handle.family()]
    for process in processes:
        assert "hunter" not in " ".join(process.cmdline())
    for key, status in (("hunter2", 200), ("hunter4", 200), ("xxxxxxx", 401)):
        response = handle.client.get("/info", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status
    log = handle.stop()
    assert "hunter" not in log
