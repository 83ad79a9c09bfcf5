"""The machine of this process: its cores and free memory within the limits of its control groups,
and settings that must precede the import of torch. Imports nothing large.
"""

import ctypes
import logging
import os
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of one control group, in bytes."""

    limit: int
    # The part of the limit that the processes of the group do not use yet.
    free: int


def group_folders(
    controller: str, groups: Path = GROUPS, own_groups: Path = OWN_GROUPS
) -> list[Path]:
    """The visible folders of this process's groups, from the innermost to the root. `controller` is
    a controller's name in cgroup version 1."""
    if not own_groups.exists():
        return []
    found = []
    for line in own_groups.read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one unnamed tree, version 1 one tree per controller.
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        group = root / path.lstrip("/")
        # In a container, the path may be the host's, of which only the root is visible.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            found.append(folder)
    return found


def memory_limit(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> MemoryLimit | None:
    """The limit with the least free memory; None: no limit is set."""
    limits = [
        limit
        for folder in group_folders("memory", groups, own_groups)
        for limit in _memory_limits(folder)
    ]
    return min(limits, key=lambda limit: limit.free, default=None)


def _memory_limits(folder: Path) -> Iterator[MemoryLimit]:
    # Version 2, then version 1.
    for limit_name, used_name, stat_prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            cached = _file_cache(folder / "memory.stat", stat_prefix)
            yield MemoryLimit(limit, max(0, limit - used + cached))


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of the page cache, which count as used but are reclaimed when memory is short."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = stat.read_text(encoding="ascii").splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in names)


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else None


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
    num_ranks: int = 1, cgroups: Path = GROUPS, own_cgroups: Path = OWN_GROUPS
) -> int:
    """Threads for the kernels: the cores that the affinity and the cgroup quotas allow; one less if
    there are many.

    Quotas are shared by all ranks, and rounded down: with two threads and 1.5 cores, each thread is
    throttled for a quarter of the time, and then the other one waits for it.
    """
    whole = num_cores(num_ranks, cgroups, own_cgroups)
    return max(1, whole - 1 if whole >= _CORES_TO_SPARE else whole)


def num_cores(num_ranks: int = 1, cgroups: Path = GROUPS, own_cgroups: Path = OWN_GROUPS) -> int:
    """Whole cores that this process, one of `num_ranks`, may use; 0 if its quota is less than one
    core."""
    cores = float(len(os.sched_getaffinity(0)))
    folders = group_folders("cpu", cgroups, own_cgroups)
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
    """The processors of one rank, of cores in the order of NUMA nodes; ranks share none. Empty:
    there are fewer processors than ranks.

    All ranks get the same number of neighbouring cores, because all wait for the slowest, with all
    hardware threads of each. If there are fewer cores than ranks, they get hardware threads."""
    units = [core.processors for core in cores]
    if len(units) < num_ranks:
        units = sorted((number,) for core in cores for number in core.processors)
    each = len(units) // num_ranks
    return {number for unit in units[rank * each : (rank + 1) * each] for number in unit}


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


# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


_NVIDIA = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded."""


def return_freed_memory() -> None:
    """Return freed memory to the system; called after loading, which frees the unpacked weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_bytes() -> int:
    """Bytes that this process may still allocate: the smaller of the machine's and the cgroup's
    free memory."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = memory_limit()
    return available if group is None else min(available, group.free)


def prepare_process(
    environment: MutableMapping[str, str],
    rank: int = 0,
    num_ranks: int = 1,
    device: str | None = None,
) -> None:
    """Set environment variables and allocator options for torch and the C library; call it before
    torch is imported and before the first thread. Values set by the user are kept. Each of several
    ranks gets its own cores or its own GPU. Raises ModelError if there is none left.

    device: cpu or cuda; None: cuda if there is a GPU.
    """
    if num_ranks > 1:
        # torch logs a long stack trace for a lost connection, which the raised error reports too.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        is_hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
        if device == "cpu" or (device is None and (is_hidden or not _NVIDIA.exists())):
            _choose_cores(environment, rank, num_ranks)
        elif not is_hidden:
            _choose_gpu(environment, rank)
    # A waiting OpenMP thread yields its core after this number of spins, instead of after
    # milliseconds.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    # OpenMP ignores a container's quota and the router.
    environment.setdefault("OMP_NUM_THREADS", str(num_compute_threads(num_ranks)))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Memory freed by one step is reused by the next. By default, glibc maps each large tensor
        # again, and the system clears its pages. One arena, because the other arenas can not grow
        # beyond 64 MiB. Other C libraries have no mallopt.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _choose_gpu(environment: MutableMapping[str, str], rank: int) -> None:
    """Make one GPU visible to the rank, so that all its threads use it, as device 0."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else []
    if names and rank >= len(names):
        raise ModelError(
            f"shard {rank} has no GPU: CUDA_VISIBLE_DEVICES names {len(names)} ({visible}); use "
            f"--num-shard {len(names)}, or --device cpu"
        )
    environment["CUDA_VISIBLE_DEVICES"] = names[rank] if names else str(rank)


def _choose_cores(environment: MutableMapping[str, str], rank: int, num_ranks: int) -> None:
    """Bind the rank to its own cores: ranks wait for each other many times in a step, and each wait
    takes long if two ranks share a core."""
    allowed = os.sched_getaffinity(0)
    own = processors_of(rank, num_ranks, read_cores(allowed))
    if own:
        os.sched_setaffinity(0, own)
    else:
        environment.setdefault("OMP_NUM_THREADS", "1")
        if rank == 0:
            logger.warning(
                "%d shards share %d cores, and wait for each other: use fewer shards",
                num_ranks,
                len(allowed),
            )
