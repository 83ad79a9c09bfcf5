"""The machine of this process: its free memory, and settings that must precede the import of torch.
Imports nothing large.
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
    group = cgroup.memory_limit()
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
                *(num_ranks, len(allowed)),
            )
