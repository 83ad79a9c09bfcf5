"""A real launcher with a memory limit for all its processes, so that a successful attack does not
exhaust the machine."""

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
# Folders of memory control groups, version 1 and 2, and their file with the limit.
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
    """`running`, whose processes share `MEMORY_LIMIT_BYTES` in a control group. Without permission
    for one (no root), the limit applies to the data of each process."""
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
            continue  # the child has just ended
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
    """Called by a new process to limit itself."""
    group = next(filter(None, (_made(root, limit) for root, limit in _GROUPS)), None)
    if group is None:
        limits = (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES)
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, limits)
        return
    members = group / "cgroup.procs"
    try:
        yield lambda: _enter(members)
    finally:
        # A killed process leaves its group a little later.
        wait_until(lambda: not members.read_text(), 10, f"{group} is empty")
        group.rmdir()


@contextmanager
def short_of_memory(process: psutil.Process, num_bytes: int) -> Iterator[None]:
    """In the block the process may use that much more memory; above it, it is killed. Raises
    AssertionError without control groups."""
    group = next(filter(None, (_made(root, limit, num_bytes) for root, limit in _GROUPS)), None)
    assert group is not None, "no control group can be made: run as root"
    members = group / "cgroup.procs"
    try:
        members.write_text(str(process.pid))
        yield
    finally:
        wait_until(lambda: not members.read_text(), 10, f"{group} is empty")
        group.rmdir()


def _made(root: Path, limit: str, num_bytes: int = MEMORY_LIMIT_BYTES) -> Path | None:
    """A new control group with the limit; None if that is not permitted."""
    group = root / f"pytgi-test-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
        (group / limit).write_text(str(num_bytes))
    except OSError:
        if group.exists():
            group.rmdir()
        return None
    return group


def _enter(members: Path) -> None:
    members.write_text(str(os.getpid()))
