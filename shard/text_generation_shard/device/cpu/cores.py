"""Which cores this process computes on, and with how many threads."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_shard.device.cpu import cgroup

# From so many cores on, one is left to the router and the event loop: they then never push a thread
# aside while all others wait for it at the end of a kernel. Of fewer, a core is too much to give.
_CORES_TO_SPARE = 4


SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """What computes by itself: the processors that the system knows it by, all threads of one
    core, and the NUMA node it belongs to."""

    node: int
    processors: tuple[int, ...]


def num_compute_threads(
    num_ranks: int = 1, cgroups: Path = cgroup.GROUPS, own_cgroups: Path = cgroup.OWN_GROUPS
) -> int:
    """Threads for the kernels: the cores this process is bound to, or what the quotas of its
    cgroups allow if that is less; one fewer where there are many.

    Quotas are rounded down: with 1.5 cores two threads would both stand still for a quarter of the
    time, and wherever one does the other waits. They are shared by all ranks.
    """
    whole = num_cores(num_ranks, cgroups, own_cgroups)
    return max(1, whole - 1 if whole >= _CORES_TO_SPARE else whole)


def num_cores(
    num_ranks: int = 1, cgroups: Path = cgroup.GROUPS, own_cgroups: Path = cgroup.OWN_GROUPS
) -> int:
    """Whole cores that this process, one of so many alike, may use; 0 if its quota is less than
    one."""
    cores = float(len(os.sched_getaffinity(0)))
    folders = cgroup.folders("cpu", cgroups, own_cgroups)
    quotas = [quota / num_ranks for folder in folders for quota in _quota_in(folder)]
    return int(min([cores, *quotas]))


def _quota_in(folder: Path) -> list[float]:
    """The quota of one cgroup, in the files of either version; empty: none."""
    both = folder / "cpu.max"
    if both.exists():
        quota, period = both.read_text(encoding="ascii").split()
        return [] if quota == "max" else [int(quota) / int(period)]
    files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if not all(file.exists() for file in files):
        return []
    quota, period = (file.read_text(encoding="ascii").strip() for file in files)
    return [] if quota == "-1" else [int(quota) / int(period)]


def processors_of(rank: int, num_ranks: int, cores: Sequence[Core]) -> set[int]:
    """The processors of one of several ranks, none of which is another's; empty: there are fewer
    than ranks. Each has as many cores: all wait for the slowest. A rank has whole NUMA nodes, or
    a part of one, where that can be; and both threads of a core, where there are enough cores."""
    nodes = sorted({core.node for core in cores})
    if num_ranks <= len(nodes):
        of_rank = nodes[rank * len(nodes) // num_ranks : (rank + 1) * len(nodes) // num_ranks]
        return {number for core in cores if core.node in of_rank for number in core.processors}
    if len(nodes) > 1 and num_ranks % len(nodes) == 0:
        each = num_ranks // len(nodes)
        own = [core for core in cores if core.node == nodes[rank // each]]
        return processors_of(rank % each, each, own)
    if len(cores) >= num_ranks:
        each = len(cores) // num_ranks
        ordered = sorted(cores, key=lambda core: (core.node, core.processors))
        own = ordered[rank * each : (rank + 1) * each]
        return {number for core in own for number in core.processors}
    numbers = sorted(number for core in cores for number in core.processors)
    return {numbers[rank]} if len(numbers) >= num_ranks else set()


def read_cores(allowed: Collection[int], system: Path = SYSTEM) -> list[Core]:
    """The cores of these processors; where the system does not say, each is a core of node 0."""
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for number in _numbers_in(folder / "cpulist")
    }
    cores = set()
    for number in allowed:
        siblings = system / f"cpu/cpu{number}/topology/thread_siblings_list"
        threads = sorted({number, *_numbers_in(siblings)} & set(allowed))
        cores.add(Core(nodes.get(number, 0), tuple(threads)))
    return sorted(cores, key=lambda core: (core.node, core.processors))


def _numbers_in(file: Path) -> list[int]:
    """Of a list as 0-3,8; none if there is no such file."""
    text = file.read_text(encoding="ascii").strip() if file.exists() else ""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    ]
