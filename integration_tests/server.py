"""Starts, queries over HTTP and stops a real `text-generation-launcher` under test."""

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from text_generation_launcher.config import console_script

SCRIPTS = Path(sys.executable).parent
# The first compilation of kernels takes a minute.
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 60.0
# No other variable of the developer's shell may reach the launcher.
_KEPT_ENVIRONMENT = (
    *("PATH", "PYTHONPATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"),
    "COVERAGE_PROCESS_CONFIG",
)

_METRIC_LINE = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{[^}]*\})?) (\S+)$")


def free_port() -> int:
    """A currently free TCP port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls until the condition holds. Raises AssertionError, with its description, otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s} s still not so: {what}"
        time.sleep(0.02)


def workers_of(module: str) -> list[psutil.Process]:
    """The processes of this process's own `Worker`s for a module, and not those of the servers that
    other tests share with this process."""
    found = list[psutil.Process]()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found += [child, *child.children()]
    return [one for one in found if not has_ended(one)]


def has_ended(process: psutil.Process) -> bool:
    """Whether a process runs no more. An orphan may stay a zombie until process 1 reaps it, which
    takes seconds on some machines."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_ended(processes: Iterable[psutil.Process], within_s: float = 20) -> None:
    """All of them have ended, or end in time."""
    deadline = time.monotonic() + within_s
    while alive := [process for process in processes if not has_ended(process)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def clean_environment() -> dict[str, str]:
    """An environment without any of TGI's variables, offline.

    One thread a shard: tiny matrices gain nothing from two, and on busy cores OpenMP's barriers
    make every step many times slower.
    """
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    kept["PATH"] = f"{SCRIPTS}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _end_with_parent() -> None:
    """Runs in the child: the server must end with a test run that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


class LauncherHandle:
    """Owns one launcher process with its children, its port, its socket folder and its log file.

    Requests go through `generate`, `stream` and `client`. `assert_idle` is the invariant after
    every test; `stop` asserts an orderly end.
    """

    def __init__(
        self,
        model: Path | None,
        *flags: str,
        in_child: Callable[[], object] = bool,
        chooses_sockets: bool = True,
        **environment: str,
    ) -> None:
        """`in_child` runs in the new process before it becomes the launcher. Unless
        `chooses_sockets`, the launcher creates their folder itself."""
        # Not under pytest's tmp_path: a unix socket path has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="pytgi-")
        self.uds_path = Path(self._folder.name) / "shard"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._log_path = Path(self._folder.name) / "log"
        # A checkout that is not installed has no commands.
        command = console_script("text-generation-launcher", "text_generation_launcher.cli")
        arguments = [*command, "--hostname", "127.0.0.1"]
        own = {"--port": str(self.port)}
        if chooses_sockets:
            own["--shard-uds-path"] = str(self.uds_path)
        if model is not None:
            own["--model-id"] = str(model)
        for flag, value in own.items():
            if flag not in flags:
                arguments += [flag, value]

        def begin() -> None:
            _end_with_parent()
            in_child()

        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*arguments, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment() | environment,
                cwd=self._folder.name,
                start_new_session=True,
                preexec_fn=begin,
            )

    @property
    def log(self) -> str:
        """What the launcher has printed so far."""
        return self._log_path.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The launcher's living descendants."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, script: str) -> psutil.Process:
        """The one descendant that runs `script` (text-generation-server or -router)."""
        found = [p for p in self.family() if any(script in part for part in p.cmdline())]
        assert len(found) == 1, f"{script} runs in {found}"
        return found[0]

    def wait_until_ready(self) -> None:
        """Returns once GET /health is 200; fails with the log if the launcher ends instead."""

        def is_ready() -> bool:
            code = self.process.poll()
            assert code is None, f"the launcher ended with code {code}:\n{self.log}"
            try:
                return self.client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, READY_TIMEOUT_S, "GET /health answers 200")

    def wait_for_exit(self, timeout_s: float = READY_TIMEOUT_S) -> int:
        """The exit code of a launcher that ends by itself."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log}") from None

    def stop(self) -> str:
        """SIGTERM, then the log; exit code 0, no orphan and no traceback are asserted."""
        family = self.family()
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            code = self.wait_for_exit(STOP_TIMEOUT_S)
            assert code == 0, f"the launcher ended with code {code}:\n{self.log}"
            assert_ended(family, within_s=5)
            log = self.log
            assert "Traceback" not in log, log
            return log
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all processes without assertions, and removes the folder. Idempotent.

        The log goes to stdout, where pytest shows it with a failure.
        """
        if self._log_path.exists():
            print(self.log)
        everyone: list[psutil.Process | subprocess.Popen[bytes]] = [*self.family(), self.process]
        for process in everyone:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(STOP_TIMEOUT_S)
        self.client.close()
        self._folder.cleanup()

    def generate(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """The JSON answer of POST /generate, details included."""
        body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, inputs: str, **parameters: Any) -> list[dict[str, Any]]:
        """All events of POST /generate_stream."""

        async def collect() -> list[dict[str, Any]]:
            async with self.async_client() as client:
                return [event async for event in stream_events(client, inputs, **parameters)]

        return asyncio.run(collect())

    def async_client(self) -> httpx.AsyncClient:
        """A client for tests with many concurrent requests."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False
        )

    def metrics(self) -> dict[str, float]:
        """GET /metrics: sample name with its labels → value."""
        lines = self.client.get("/metrics").text.splitlines()
        found = (_METRIC_LINE.match(line) for line in lines if not line.startswith("#"))
        return {match[1]: float(match[2]) for match in found if match}

    def is_idle(self) -> bool:
        """Whether no request waits or runs, no row is taken and every KV block is free."""
        metrics = self.metrics()
        busy = ("tgi_queue_size", "tgi_batch_current_size", "tgi_kv_blocks_used")
        return all(metrics[name] == 0 for name in busy)

    def assert_idle(self) -> None:
        """The invariant between tests: all rows and blocks are freed within seconds."""
        wait_until(self.is_idle, 20, "nothing queued, nothing running, no KV block held")
        assert self.client.get("/health").status_code == 200


@contextmanager
def running(model: Path | None, *flags: str, **environment: Any) -> Iterator[LauncherHandle]:
    """A launcher that is ready inside the block and ends in order after it."""
    handle = LauncherHandle(model, *flags, **environment)
    try:
        handle.wait_until_ready()
        yield handle
        handle.stop()
    finally:
        handle.kill()


class SharedServers:
    """Owns the servers that tests share, one for each model and its flags; `end` stops all.

    At most `MOST` run: what was given least recently ends first, so ask again in each test.
    """

    MOST = 3  # each holds half a gigabyte, and every worker of pytest has its own

    def __init__(self) -> None:
        self._running: dict[tuple[Path | None, tuple[str, ...]], LauncherHandle] = {}

    def get(self, model: Path | None, *flags: str) -> LauncherHandle:
        """The server, which is ready; it is started where none runs."""
        handle = self._running.pop((model, flags), None)
        if handle is None:
            while len(self._running) >= self.MOST:
                self._stop_oldest()
            handle = LauncherHandle(model, *flags)
            try:
                handle.wait_until_ready()
            except BaseException:
                handle.kill()
                raise
        self._running[model, flags] = handle
        return handle

    def end(self) -> None:
        """Stops all, in order. Raises AssertionError if one does not end well."""
        try:
            while self._running:
                self._stop_oldest()
        finally:
            for handle in self._running.values():
                handle.kill()

    def _stop_oldest(self) -> None:
        self._running.pop(next(iter(self._running))).stop()


async def stream_events(
    client: httpx.AsyncClient, inputs: str, **parameters: Any
) -> AsyncIterator[dict[str, Any]]:
    """The events of one POST /generate_stream as they come; `details` are asked for."""
    body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))


def token_ids(answer: Mapping[str, Any] | list[dict[str, Any]]) -> list[int]:
    """The ids that were generated, from an answer of /generate or from all events of a stream."""
    if isinstance(answer, list):
        return [event["token"]["id"] for event in answer]
    return [token["id"] for token in answer["details"]["tokens"]]
