"""Watches the processes of a server in a soak: their memory, and what is left after its end."""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from soak_verdict import Life

from integration_tests.server import LauncherHandle, has_ended

ROLES = {
    "text-generation-launcher": "launcher",
    "text-generation-router": "router",
    "text-generation-server": "shard",
}
# An anonymous mapping of at least this size is the KV cache.
_CACHE_BYTES = 256 << 20


class Watch(threading.Thread):
    """Owns the memory records of all processes that the server ever had. Samples in a thread of its
    own; `stop` ends it."""

    def __init__(self, handle: LauncherHandle, now: Callable[[], float], every_s: float) -> None:
        super().__init__(name="soak-watch", daemon=True)
        self.lives: dict[tuple[int, float], Life] = {}
        self.processes: list[psutil.Process] = []
        self._handle, self._now, self._every_s = handle, now, every_s
        self._stopped = threading.Event()

    def run(self) -> None:
        """Samples periodically."""
        while not self._stopped.wait(self._every_s):
            self.look()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self.join()

    def look(self) -> None:
        """Takes one sample."""
        if self._handle.process.poll() is not None:
            return
        root = psutil.Process(self._handle.process.pid)
        for process in [root, *self._handle.family()]:
            with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
                key = process.pid, process.create_time()
                if key not in self.lives:
                    self.lives[key] = Life(_role(process), process.pid)
                    self.processes.append(process)
                memory, cache = _rss_mb(process.pid)
                if memory:
                    life, now = self.lives[key], round(self._now(), 1)
                    life.points.append((now, memory))
                    if cache:
                        life.cache.append((now, cache))


def _role(process: psutil.Process) -> str:
    """The name by its script; a child that the script forks has another name."""
    command, parent = process.cmdline(), process.parent()
    is_fork = parent is not None and parent.cmdline() == command
    found = [ROLES[Path(part).name] for part in command if Path(part).name in ROLES]
    return found[0] if found and not is_fork else "other"


def _rss_mb(pid: int) -> tuple[float, float]:
    """The resident sets without the KV cache, and of it. Not PSS, which grows when other processes
    with the same libraries end."""
    memory = cache = 0
    is_anonymous = is_cache = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, value = line.partition(":")
        if first == "Size":
            is_cache = is_anonymous and int(value.split()[0]) * 1024 >= _CACHE_BYTES
        elif first == "Rss":
            size = int(value.split()[0]) * 1024
            if is_cache:
                cache += size
            else:
                memory += size
        elif "-" in line.split(" ", 1)[0]:
            is_anonymous = len(line.split()) == 5
    return round(memory / 1e6, 2), round(cache / 1e6, 2)


def descriptors(handle: LauncherHandle) -> Counter[str]:
    """Open descriptors of launcher and router, by what they refer to."""
    found: Counter[str] = Counter()
    for name, pid in (
        ("launcher", handle.process.pid),
        ("router", handle.child("text-generation-router").pid),
    ):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found[f"{name} {re.sub('[0-9]+', 'N', os.readlink(path))}"] += 1
    return found


def what_is_left(processes: Sequence[psutil.Process], folder: Path) -> list[str]:
    """The processes and sockets that are left after the server's end."""
    wait(lambda: all(map(has_ended, processes)), 5)
    left = [f"process {process.pid}" for process in processes if not has_ended(process)]
    left += [f"socket {path.name}" for path in folder.glob("shard-*")]
    return left


def wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
