"""A real launcher whose processes together may use only so much memory, so that an attack that
succeeds takes nobody else's."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import psutil

from integration_tests.server import LauncherHandle, wait_until

MEMORY_LIMIT_BYTES = 6_000_000_000
_numbers = count()
# Where control groups of memory are made: version 1, version 2; and the file with the limit.
_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@contextmanager
def contained(
    model: Path | None,
    *flags: str,
    in_child: Callable[[], object] = bool,
    **environment: str,
) -> Iterator[LauncherHandle]:
    """`running`, of which all processes share `MEMORY_LIMIT_BYTES` in a control group. Where none
    can be made (no root), each process may have that much data."""
    with ExitStack() as stack:
        enter = stack.enter_context(_memory_limit())

        def prepare() -> None:
            enter()
            in_child()

        handle = LauncherHandle(model, *flags, in_child=prepare, **environment)
        stack.callback(handle.kill)
        handle.wait_until_ready()
        yield handle
        handle.stop()


def family_bytes(handle: LauncherHandle) -> int:
    """The memory of the launcher and its descendants that no other process shares."""
    total = 0
    for process in [psutil.Process(handle.process.pid), *handle.family()]:
        try:
            total += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue  # a child that has just ended
    return total


def cpu_seconds(handle: LauncherHandle) -> float:
    """Processor time that the living processes of the launcher have used so far."""
    total = 0.0
    for process in [psutil.Process(handle.process.pid), *handle.family()]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@contextmanager
def _memory_limit() -> Iterator[Callable[[], None]]:
    """What a new process calls to be limited."""
    group = next(filter(None, (_made(root, limit) for root, limit in _GROUPS)), None)
    if group is None:
        limits = (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES)
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, limits)
        return
    members = group / "cgroup.procs"
    try:
        yield lambda: _enter(members)
    finally:
        # A process that was killed leaves its group a moment later.
        wait_until(lambda: not members.read_text(), 10, f"nobody is left in {group}")
        group.rmdir()


def _made(root: Path, limit: str) -> Path | None:
    """A new control group with the limit; None where there can be none."""
    group = root / f"pytgi-test-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
        (group / limit).write_text(str(MEMORY_LIMIT_BYTES))
    except OSError:
        if group.exists():
            group.rmdir()
        return None
    return group


def _enter(members: Path) -> None:
    members.write_text(str(os.getpid()))
