"""The machine this process runs on: its memory, and what must be set before torch is loaded.

It imports nothing large.
"""

import ctypes
from collections.abc import MutableMapping
from pathlib import Path

from text_generation_shard.device.cpu import cgroup
from text_generation_shard.device.cpu.cores import num_compute_threads

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def return_freed_memory() -> None:
    """Give pages of freed tensors back to the system: after loading, when many of them, of weights
    that have been packed since, will not be needed again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_bytes() -> int:
    """What this process may still take: the machine's free memory, or its cgroup's rest if less."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = cgroup.memory_limit()
    return available if group is None else min(available, group.free)


def prepare_process(environment: MutableMapping[str, str]) -> None:
    """Set what torch and the C library read when they start; call it before either does, and before
    the first thread. What the user has set is kept."""
    # A thread that waits for another gives up its core after so many spins, not after milliseconds.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    # OpenMP knows neither of a container's quota, nor of the router.
    environment.setdefault("OMP_NUM_THREADS", str(num_compute_threads()))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # What tensors of one step free is kept for those of the next: by default glibc maps every
        # large one anew, and the system clears it page by page. One arena, because the others can
        # not grow beyond 64 MiB. Other C libraries lack mallopt and stay as they are.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
