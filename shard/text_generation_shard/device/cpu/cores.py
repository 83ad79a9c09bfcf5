"""The cores and the number of threads of this process."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_shard.device.cpu import cgroup

# From this number of cores, one is left to the router and the event loop. So they do not preempt a
# kernel's thread while the other threads wait for it. With fewer cores, that costs too much.
_CORES_TO_SPARE = 4


SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its NUMA node, and the system's numbers of its hardware threads."""

    node: int
    processors: tuple[int, ...]


def num_compute_threads(
    num_ranks: int = 1, cgroups: Path = cgroup.GROUPS, own_cgroups: Path = cgroup.OWN_GROUPS
) -> int:
    """Threads for the kernels: the cores that the affinity and the cgroup quotas allow; one less if
    there are many.

    Quotas are shared by all ranks, and rounded down: with two threads and 1.5 cores, each thread is
    throttled for a quarter of the time, and then the other one waits for it.
    """
    whole = num_cores(num_ranks, cgroups, own_cgroups)
    return max(1, whole - 1 if whole >= _CORES_TO_SPARE else whole)


def num_cores(
    num_ranks: int = 1, cgroups: Path = cgroup.GROUPS, own_cgroups: Path = cgroup.OWN_GROUPS
) -> int:
    """Whole cores that this process, one of `num_ranks`, may use; 0 if its quota is less than one
    core."""
    cores = float(len(os.sched_getaffinity(0)))
    folders = cgroup.folders("cpu", cgroups, own_cgroups)
    quotas = [quota / num_ranks for folder in folders for quota in _quota_in(folder)]
    return int(min([cores, *quotas]))


def _quota_in(folder: Path) -> list[float]:
    """The quota of one cgroup of version 1 or 2; empty: no quota."""
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
    """The processors of one rank; ranks share none. Empty: there are fewer processors than ranks.

    All ranks get the same number of cores, because all wait for the slowest. If possible, a rank
    gets whole NUMA nodes or a part of one node, and all hardware threads of its cores."""
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
    """The cores of the processors `allowed`. If the system has no topology, each is a core of node
    0."""
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
    """Parse a list such as 0-3,8; empty if the file does not exist."""
    text = file.read_text(encoding="ascii").strip() if file.exists() else ""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    ]
