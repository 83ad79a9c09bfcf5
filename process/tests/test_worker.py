"""Calls that work, hang, die and grow, in processes that can be killed."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from text_generation_process.worker import (
    Worker,
    WorkerClosedError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)

from launcher.tests.conftest import is_running, wait_until

MODULE = "worker_calls"
MEMORY_BYTES = 256 << 20


@pytest.fixture(scope="module", autouse=True)
def has_module() -> Iterator[None]:
    """Processes find the module of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    """A started worker for tests that do not end its server."""
    worker = Worker(MODULE, b"prepared", memory_bytes=MEMORY_BYTES)
    worker.start()
    yield worker
    worker.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One that was not started."""
    worker = Worker(MODULE, memory_bytes=MEMORY_BYTES)
    yield worker
    worker.close()


def pid_of(worker: Worker) -> int:
    """The process id of the next idle runner."""
    return int(worker.call("pid", b"", 5))


def server_of(worker: Worker) -> psutil.Process:
    found = psutil.Process(pid_of(worker)).parent()
    assert found is not None
    return found


def test_a_runner_takes_many_calls_after_one_preparation(shared: Worker) -> None:
    text = os.urandom(3_000_000)
    assert shared.call("with_prepared", text, 5) == text + b"prepared"
    assert pid_of(shared) == pid_of(shared) != os.getpid()


@pytest.mark.parametrize("function", ["sleep", "compute"])
def test_a_call_that_takes_too_long_is_killed(shared: Worker, function: str) -> None:
    runner = pid_of(shared)
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=f"{function} did not end in 0.2 s"):
        shared.call(function, b"", 0.2)
    assert time.monotonic() - began < 0.2 + 1
    assert pid_of(shared) != runner
    wait_until(lambda: not is_running(runner))


@pytest.mark.parametrize("function", ["die", "fail", "grow"])
def test_a_call_without_an_answer_fails_alone(shared: Worker, function: str) -> None:
    server = server_of(shared)
    with pytest.raises(WorkerError, match=f"the process of {function} died"):
        shared.call(function, b"", 5)
    assert server_of(shared) == server


def test_a_call_whose_server_dies_is_repeated_once(worker: Worker, tmp_path: Path) -> None:
    (ends := tmp_path / "ends").write_text("\n")
    assert worker.call("kill_server", str(ends).encode(), 5) == b"repeated"
    ends.write_text("\n" * 3)
    with pytest.raises(WorkerError, match="the process of kill_server died"):
        worker.call("kill_server", str(ends).encode(), 5)
    assert ends.read_text() == "\n"


def test_a_runner_that_has_grown_ends_after_its_answer(shared: Worker) -> None:
    runner = pid_of(shared)
    assert shared.call("grow_a_little", b"", 5) == str(runner).encode()
    assert pid_of(shared) != runner


@pytest.mark.parametrize("is_server", [False, True], ids=["runner", "server"])
def test_an_idle_process_that_died_is_replaced(worker: Worker, is_server: bool) -> None:
    runner, server = pid_of(worker), server_of(worker)
    os.kill(server.pid if is_server else runner, signal.SIGKILL)
    wait_until(lambda: not is_running(runner))
    assert pid_of(worker) != runner
    assert (server_of(worker) == server) == (not is_server)


def test_a_runner_that_ignores_its_timeout_is_ended_with_its_server(worker: Worker) -> None:
    server = server_of(worker)
    with pytest.raises(WorkerTimeoutError):
        worker.call("ignore_timeout", b"", 0.1)
    assert not is_running(server.pid)
    assert server_of(worker) != server


def test_a_runner_has_no_descriptor_of_the_server_or_of_this_process(shared: Worker) -> None:
    inheritable, other = os.pipe()
    os.set_inheritable(inheritable, True)
    try:
        targets = shared.call("descriptors", b"", 5).decode().split()
    finally:
        os.close(inheritable)
        os.close(other)
    assert sorted(targets)[:3] == ["/dev/null"] * 3
    assert len([target for target in targets if target.startswith("socket:")]) == 1
    assert not [target for target in targets if target.startswith("pipe:")]


def test_close_ends_calls_and_processes(worker: Worker) -> None:
    server = server_of(worker)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(worker.call, "compute", b"", 30)
        wait_until(lambda: any(child.cpu_times().user > 0.1 for child in server.children()))
        processes = [server, *server.children()]
        worker.close()
        assert isinstance(running.exception(), WorkerClosedError)
    wait_until(lambda: not any(is_running(process.pid) for process in processes))
    with pytest.raises(WorkerClosedError):
        worker.call("pid", b"", 5)


def test_all_processes_end_with_the_parent() -> None:
    program = f"""
from text_generation_process.worker import Worker
worker = Worker({MODULE!r}, memory_bytes={MEMORY_BYTES})
print(worker.call("pid", b"", 5).decode(), flush=True)
worker.call("sleep", b"", 60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        runner = psutil.Process(int(parent.stdout.readline()))
        server = runner.parent()
        assert server is not None
        parent.kill()
    wait_until(lambda: not is_running(server.pid) and not is_running(runner.pid))


def test_a_process_without_descriptors_is_told_so(worker: Worker) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        with pytest.raises(WorkerStartError, match="Too many open files"):
            worker.call("pid", b"", 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert pid_of(worker)
