"""A real launcher whose children are small scripts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.tests.fakes import world as world

SETTLED_S = 10.0
"""Longest wait; only a failing test waits this long."""

LAUNCHER = """
import json, os, sys
from pathlib import Path
from text_generation_launcher import pipes, restarts, supervisor
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.log import Log
from text_generation_launcher.process import Command, block_signals

given = json.loads(sys.argv[1])
supervisor.WAITING_NOTICE_S = 0.2
pipes.STARTING_SILENCE_S, pipes.SILENCE_S = given["silences_s"]
restarts.FIRST_DELAY_S = 0.01

def command(name, program):
    argv = (sys.executable, "-c", program, "{model_path}")
    # `make coverage` measures the launcher, not these scripts.
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    return Command(name, name, argv, environment)

block_signals()
config = LauncherConfig(
    download=command("download", given["download"]) if given["download"] else None,
    model_path=None if given["download"] else Path("/models/some"),
    shards=(command("shard 0", given["shard"]),),
    router=command("the router", given["router"]),
    shard_uds_path=given["uds"],
    hostname="127.0.0.1",
    port=given["port"],
    termination_timeout_s=5.0,
    restarts=given["restarts"],
)
sys.exit(supervisor.Supervisor(config, Log("INFO", json_output=False)).run())
"""

PRELUDE = """
import json, os, signal, socket, sys, time
from pathlib import Path
FOLDER, UDS, PORT = Path({folder!r}), {uds!r}, {port}
def note(text):
    with open(FOLDER / "trace", "a") as trace:
        trace.write(text + "\\n")
def pid_file(name):
    (FOLDER / (name + ".tmp")).write_text(str(os.getpid()))
    (FOLDER / (name + ".tmp")).rename(FOLDER / (name + ".pid"))
def log(level, message):
    print(json.dumps(dict(timestamp="T", level=level, target="child", message=message)), flush=True)
def begin(name):
    def end(*_):
        note(name + " got SIGTERM")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    pid_file(name)
def sleep():
    time.sleep(600)
def wait_for(name):
    while not (FOLDER / name).exists(): time.sleep(0.01)
def serve_shard():
    global shard_socket
    begin("shard")
    shard_socket = socket.socket(socket.AF_UNIX)
    shard_socket.bind(f"{{UDS}}-0")
    note("shard started with " + sys.argv[1])
def beat():
    [pipe] = [given for given in sys.argv if given.startswith("--launcher-fd=")]
    os.write(int(pipe.partition("=")[2]), b'{{"event":"alive"}}\\n')
def serve_router():
    begin("router")
    server = socket.create_server(("127.0.0.1", PORT))
    note("router started with " + sys.argv[1])
    while True:
        with server.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
"""


@dataclass
class Launched:
    """A running launcher, and the folder for notes of its children."""

    process: "subprocess.Popen[str]"
    folder: Path
    lines: list[str] = field(default_factory=list)

    def wait_for_line(self, part: str) -> str:
        """Reads the log up to the line that contains `part`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if part in line:
                return self.lines[-1]
        raise AssertionError(f"{part!r} not in the log:\n" + "\n".join(self.lines))

    def wait_for_child(self, name: str) -> int:
        """The process id of a child that runs its script."""
        path = self.folder / f"{name}.pid"
        wait_until(path.exists)
        return int(path.read_text())

    def end(self) -> tuple[int, list[str]]:
        """Exit code and whole log, after the launcher has ended."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(SETTLED_S), self.lines

    def trace(self) -> list[str]:
        """The notes of the children, in order."""
        path = self.folder / "trace"
        return path.read_text().splitlines() if path.exists() else []

    def assert_no_orphan(self) -> None:
        """Every child that ran its script has ended."""
        for path in self.folder.glob("*.pid"):
            pid = int(path.read_text())
            wait_until(lambda pid=pid: not is_running(pid))


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails if the condition doesn't become true."""
    deadline = time.monotonic() + SETTLED_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(autouse=True)
def hangup_has_its_default_meaning() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, which launchers would inherit from the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def launch(tmp_path: Path, free_port: int) -> Iterator[Callable[..., Launched]]:
    """Starts launchers with the given scripts as children; ends them after the test."""
    started: list[Launched] = []
    uds = str(tmp_path / "shard")

    def start(
        shard: str = "serve_shard(); sleep()",
        router: str = "serve_router()",
        download: str | None = None,
        silences_s: tuple[float, float] = (60.0, 5.0),
        restarts: bool = False,
        **popen: object,
    ) -> Launched:
        prelude = PRELUDE.format(folder=str(tmp_path), uds=uds, port=free_port)
        given = {
            "download": prelude + download if download else None,
            "shard": prelude + shard,
            "router": prelude + router,
            "uds": uds,
            "port": free_port,
            "silences_s": silences_s,
            "restarts": restarts,
        }
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-c", LAUNCHER, json.dumps(given)],
            text=True,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | popen),
        )
        started.append(Launched(process, tmp_path))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
        for pipe in (launched.process.stdin, launched.process.stdout):
            if pipe:
                pipe.close()
        for path in launched.folder.glob("*.pid"):
            if is_running(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)
