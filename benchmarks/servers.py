"""Starts, watches and ends a server under measurement. contestants.py describes the others."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

FOLDER = Path(__file__).resolve().parent
WORK = FOLDER / ".work"
READY_TIMEOUT_S = 600.0  # vLLM compiles for minutes at its first start


@dataclass(frozen=True, slots=True)
class Server:
    """One contestant."""

    name: str
    api: str
    """A key of load.APIS."""
    command: tuple[str, ...]
    """`{port}` and `{folder}` (a new temporary one) are filled in."""
    model: str
    """The model's name in requests."""
    environment: tuple[tuple[str, str], ...] = ()
    """Added to the benchmark's own environment."""


def ours(checkpoint: Path | None, *flags: str, name: str = "pytgi") -> Server:
    """This project's launcher; without a checkpoint it serves the embedded model."""
    command = [str(Path(sys.executable).parent / "text-generation-launcher")]
    command += ["--hostname", "127.0.0.1", "--port", "{port}"]
    command += ["--shard-uds-path", "{folder}/shard"]
    if checkpoint is not None:
        command += ["--model-id", str(checkpoint)]
    return Server(name, "tgi", (*command, *flags), "")


class Running:
    """Owns a server process and its children; measures start time and memory."""

    def __init__(self, server: Server, folder: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.server = server
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        arguments = [part.format(port=port, folder=folder) for part in server.command]
        self.started = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **dict(server.environment)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                arguments, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self.ready_s = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> float:
        """Seconds from the start of the process to the first 200 of GET /health."""
        while True:
            elapsed = time.perf_counter() - self.started
            if self._process.poll() is not None or elapsed > READY_TIMEOUT_S:
                raise RuntimeError(f"{self.server.name} did not start:\n{self.tail_of_log()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return elapsed
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)

    def peak_rss_mb(self) -> dict[str, float]:
        """Largest resident set so far of each process, by the name of its program, in MB.

        Shared memory counts for each process, and the peaks may be at different times.
        """
        peaks: dict[str, float] = {}
        for process in self._family():
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                name = _program(process.cmdline())
                peak = _megabytes(Path(f"/proc/{process.pid}/status"), "VmHWM")
                peaks[name] = peaks.get(name, 0.0) + peak
        return peaks

    def pss_mb(self) -> float:
        """Current memory of all processes, in MB; shared memory counts once."""
        total = 0.0
        for process in self._family():
            with suppress(FileNotFoundError, ProcessLookupError):
                total += _megabytes(Path(f"/proc/{process.pid}/smaps_rollup"), "Pss")
        return total

    def tail_of_log(self) -> str:
        """The last lines the server printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def _family(self) -> list[psutil.Process]:
        """The process and its descendants; none if it has ended. Any may end at any time."""
        if self._process.poll() is not None:
            return []
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after 20 seconds."""
        family = self._family()
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):  # the server may have died before its children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running(server: Server, folder: Path) -> Iterator[Running]:
    """The server, ready in the block and ended after it, also if SIGTERM ends this process."""
    folder.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        handle = Running(server, folder)
        try:
            yield handle
        finally:
            handle.stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # timeout(1) sends it twice: the server is stopped first
    sys.exit(128 + number)


def _megabytes(file: Path, field: str) -> float:
    """0 if the field is missing, as for a process that is ending."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _program(command_line: list[str]) -> str:
    """`text-generation-router` of `python /…/text-generation-router --port …`."""
    names = [Path(part).name for part in command_line[:2] if not part.startswith("-")]
    return names[-1] if names and names[0].startswith("python") else "".join(names[:1])
