"""Running and waiting requests get an error if the shard makes no progress, and only then."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, wait_until

PROMPT = "the cat sat on "
LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos_token": True}
NUM_ROWS = 8
NUM_CLIENTS = 2 * NUM_ROWS
DEADLINE_S = 2.0
# A client gets the error at most this long after the deadline, beside other tests.
NOTICE_S = 4.0

ENDLESS = """
import sys

if "serve" in sys.orig_argv:
    import os
    import time
    from text_generation_shard.engine import output

    plain = output.verify

    def endless(*arguments):
        time.sleep(0.01)
        # The step's thread stands still; the one that answers Health does not.
        while os.path.exists({path!r}):
            time.sleep(0.05)
        return plain(*arguments)

    output.verify = endless
"""


class Told(NamedTuple):
    """The last event of a client, and its time."""

    event: dict[str, Any]
    at: float


def ask(handle: LauncherHandle, number: int) -> Told:
    """Reads one long stream to its end."""
    body = {"inputs": f"{number} {PROMPT}", "parameters": LONG}
    with handle.client.stream("POST", "/generate_stream", json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith(("data:", "{"))]
    return Told(json.loads(lines[-1].removeprefix("data:")), time.monotonic())


def crowd(handle: LauncherHandle, pool: ThreadPoolExecutor) -> Sequence[Future[Told]]:
    """As many clients that run as wait."""
    clients = [pool.submit(ask, handle, number) for number in range(NUM_CLIENTS)]

    def is_full() -> bool:
        metrics = handle.metrics()
        counts = metrics["tgi_batch_current_size"], metrics["tgi_queue_size"]
        return counts == (NUM_ROWS, NUM_ROWS)

    wait_until(is_full, 20, "all rows run, and as many wait")
    return clients


BROKEN = """
import sys

if any("text-generation-router" in word for word in sys.orig_argv):
    from text_generation_router.scheduler.planner import Planner

    plain, steps = Planner.settle, []

    def settle(self, *arguments):
        steps.append(1)
        if len(steps) > 40 and len(self.running) > 4:
            raise KeyError("no such row")
        return plain(self, *arguments)

    Planner.settle = settle
"""


def with_code(folder: Path, code: str) -> str:
    """PYTHONPATH of processes that run this code first."""
    (folder / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def serve(launch: Launch, model: Path, *flags: str, **environment: str) -> LauncherHandle:
    handle = launch(model, "--max-batch-size", str(NUM_ROWS), *flags, **environment)
    handle.wait_until_ready()
    return handle


def serve_slowly(launch: Launch, model: Path, folder: Path, *flags: str) -> LauncherHandle:
    """Its steps take 10 ms, and never end while `folder`/endless is there."""
    code = ENDLESS.format(path=str(folder / "endless"))
    deadline = ("--step-deadline", f"{DEADLINE_S:g}")
    return serve(launch, model, *deadline, *flags, PYTHONPATH=with_code(folder, code))


def stop_shard(handle: LauncherHandle, _: Path) -> None:
    handle.child("text-generation-server").send_signal(signal.SIGSTOP)


def begin_endless_step(_: LauncherHandle, path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("hang", [stop_shard, begin_endless_step])
def test_everybody_is_told_when_nothing_moves(
    hang: Callable[[LauncherHandle, Path], None],
    launch: Launch,
    tiny_model_path: Path,
    tmp_path: Path,
) -> None:
    handle = serve_slowly(launch, tiny_model_path, tmp_path, "--no-restart")
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = crowd(handle, pool)
        began = time.monotonic()
        hang(handle, tmp_path / "endless")
        for client in clients:
            told = client.result(30)
            assert told.event["error_type"] in ("generation", "overloaded"), told
            assert DEADLINE_S - 0.1 < told.at - began < DEADLINE_S + NOTICE_S, told
    assert handle.wait_for_exit(30) == 1
    last = handle.log.rpartition(" ERROR text_generation_launcher: ")[2]
    assert "The shards have not finished a step within 2 s" in last


def test_a_server_stopped_as_a_whole_goes_on(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    """As when a laptop sleeps."""
    handle = serve_slowly(launch, tiny_model_path, tmp_path)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = crowd(handle, pool)
        everybody = [psutil.Process(handle.process.pid), *handle.family()]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        time.sleep(2 * DEADLINE_S)
        for process in everybody:
            process.send_signal(signal.SIGCONT)
        for client in clients:
            told = client.result(60)
            assert "error" not in told.event, told
    handle.assert_idle()
    handle.stop()


def test_a_second_signal_ends_every_stream_with_an_event(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    handle = serve_slowly(launch, tiny_model_path, tmp_path)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = crowd(handle, pool)
        handle.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "running requests" in handle.log, 10, "it is to stop")
        began = time.monotonic()
        handle.process.send_signal(signal.SIGTERM)
        for client in clients:
            told = client.result(10)
            assert told.event["error_type"].startswith("incomplete_generation"), told
            assert told.at - began < NOTICE_S
        assert handle.wait_for_exit(10) == 1


def test_a_scheduler_that_fails_ends_the_server(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    paths = with_code(tmp_path, BROKEN)
    handle = serve(launch, tiny_model_path, "--no-restart", PYTHONPATH=paths)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask, handle, number) for number in range(NUM_CLIENTS)]
        for client in clients:
            told = client.result(30)
            assert told.event["error_type"] in ("generation", "healthcheck"), told
    assert handle.wait_for_exit(30) == 1
    last = handle.log.rpartition(" ERROR text_generation_launcher: ")[2]
    assert "The scheduler has failed: KeyError: 'no such row'" in last
