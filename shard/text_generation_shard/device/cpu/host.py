"""The machine this process runs on: its memory, and what must be set before torch is loaded.

It imports nothing large.
"""

import ctypes
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

from text_generation_shard.device.cpu import cgroup
from text_generation_shard.device.cpu.cores import num_compute_threads, processors_of, read_cores
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


_NVIDIA = Path("/dev/nvidiactl")
"""There is a driver of NVIDIA's."""


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


def prepare_process(
    environment: MutableMapping[str, str],
    rank: int = 0,
    num_ranks: int = 1,
    device: str | None = None,
) -> None:
    """Set what torch and the C library read when they start; call it before either does, and before
    the first thread. What the user has set is kept. One of several ranks gets cores of its own, or
    a GPU. ModelError if there is none for it.

    device: cpu or cuda; None: cuda where there is one.
    """
    if num_ranks > 1:
        # What torch says of a lost connection is a page of addresses; the error says it, too.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        is_hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
        if device == "cpu" or (device is None and (is_hidden or not _NVIDIA.exists())):
            _choose_cores(environment, rank, num_ranks)
        elif not is_hidden:
            _choose_gpu(environment, rank)
    # A thread that waits for another gives up its core after so many spins, not after milliseconds.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    # OpenMP knows neither of a container's quota, nor of the router.
    environment.setdefault("OMP_NUM_THREADS", str(num_compute_threads(num_ranks)))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # What tensors of one step free is kept for those of the next: by default glibc maps every
        # large one anew, and the system clears it page by page. One arena, because the others can
        # not grow beyond 64 MiB. Other C libraries lack mallopt and stay as they are.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _choose_gpu(environment: MutableMapping[str, str], rank: int) -> None:
    """A rank sees one GPU: so all of its threads use that one, which they know as the first."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else []
    if names and rank >= len(names):
        raise ModelError(
            f"shard {rank} has no GPU: CUDA_VISIBLE_DEVICES names {len(names)} ({visible}); use "
            f"--num-shard {len(names)}, or --device cpu"
        )
    environment["CUDA_VISIBLE_DEVICES"] = names[rank] if names else str(rank)


def _choose_cores(environment: MutableMapping[str, str], rank: int, num_ranks: int) -> None:
    """A rank computes on cores that no other one does: ranks wait for each other hundreds of times
    in a step, and where two share a core, each time for one that does not run."""
    allowed = os.sched_getaffinity(0)
    own = processors_of(rank, num_ranks, read_cores(allowed))
    if own:
        os.sched_setaffinity(0, own)
    else:
        environment.setdefault("OMP_NUM_THREADS", "1")
        if rank == 0:
            logger.warning(
                "%d shards share %d cores, and wait for each other: use fewer shards",
                *(num_ranks, len(allowed)),
            )
