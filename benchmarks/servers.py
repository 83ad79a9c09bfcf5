"""The servers that are compared: how each is installed, started, measured and ended."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

FOLDER = Path(__file__).resolve().parent
WORK = FOLDER / ".work"
PEER_PYTHON = WORK / "transformers" / "bin" / "python"
READY_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Server:
    """One contestant."""

    name: str
    api: str
    """A key of load.APIS."""
    command: tuple[str, ...]
    """`{port}` and `{folder}` (a fresh temporary one) are filled in."""
    model: str
    """The model's name in requests."""


def ours(checkpoint: Path | None, *flags: str) -> Server:
    """This project's launcher; without a checkpoint it serves the embedded model."""
    command = [str(Path(sys.executable).parent / "text-generation-launcher")]
    command += ["--hostname", "127.0.0.1", "--port", "{port}"]
    command += ["--shard-uds-path", "{folder}/shard"]
    if checkpoint is not None:
        command += ["--model-id", str(checkpoint)]
    return Server("pytgi", "tgi", (*command, *flags), "")


def transformers_serve(checkpoint: Path) -> Server:
    """transformers' own server, as it starts."""
    command = [str(PEER_PYTHON.parent / "transformers"), "serve", str(checkpoint)]
    command += ["--continuous-batching", "--host", "127.0.0.1", "--port", "{port}"]
    return Server("transformers serve", "openai", tuple(command), str(checkpoint))


def install_peer() -> None:
    """Creates the virtual environment of transformers serve unless it is there."""
    if (PEER_PYTHON.parent / "transformers").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(WORK / "transformers")], check=True)
    packages = ["torch==2.13.0", "transformers[serving]==5.23.0"]
    subprocess.run([str(PEER_PYTHON), "-m", "pip", "install", *packages], check=True)


class Running:
    """A server process with its children; knows how long it took and how much memory it holds."""

    def __init__(self, server: Server, folder: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.server = server
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        arguments = [part.format(port=port, folder=folder) for part in server.command]
        self.started = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                arguments, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
            )
        self.ready_s = self._wait_until_ready()

    def _wait_until_ready(self) -> float:
        """Seconds from the start of the process to the first 200 of GET /health."""
        while True:
            elapsed = time.perf_counter() - self.started
            if self._process.poll() is not None or elapsed > READY_TIMEOUT_S:
                self.stop()
                raise RuntimeError(f"{self.server.name} did not start:\n{self.log.read_text()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return elapsed
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)

    def peak_rss_mb(self) -> dict[str, float]:
        """Largest resident set so far of each process, by the name of its program, in MB."""
        peaks: dict[str, float] = {}
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
            name = _program(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text()
            kilobytes = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            peaks[name] = peaks.get(name, 0.0) + int(kilobytes.split()[1]) / 1000
        return peaks

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for whatever is left after 20 seconds."""
        root = psutil.Process(self._process.pid)
        family = root.children(recursive=True) if self._process.poll() is None else []
        self._process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([*family, root], timeout=20)
        for process in alive:
            process.kill()
        self._process.wait()


@contextmanager
def running(server: Server, folder: Path) -> Iterator[Running]:
    """The server, ready inside the block and gone after it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = Running(server, folder)
    try:
        yield handle
    finally:
        handle.stop()


def _program(command_line: list[str]) -> str:
    """`text-generation-router` of `python /…/text-generation-router --port …`."""
    names = [Path(part).name for part in command_line[:2]]
    return names[1] if len(names) > 1 and names[0].startswith("python") else names[0]
