"""How much memory there is, and how the C allocator keeps it."""

import ctypes
import os
from pathlib import Path

import torch

from text_generation_shard.errors import ModelError
from text_generation_shard.kv_cache import CacheShape
from text_generation_shard.step import WarmupLimits

_CGROUP = Path("/sys/fs/cgroup")
# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let the C allocator keep what tensors of one step free for those of the next.

    By default glibc maps every large tensor anew and the kernel clears it page by page: that was a
    fifth of the time of a prefill. One arena, because the others cannot grow beyond 64 MiB. Call
    it before the first thread; other C libraries lack mallopt and stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def available_cpu_bytes() -> int:
    """What this process may still take: the machine's free memory, or its cgroup's rest if less."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    # Version 2 of the cgroup interface, then version 1.
    for limit_name, used_name, stat_prefix in (
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ):
        limit, used = _read(_CGROUP / limit_name), _read(_CGROUP / used_name)
        if limit is not None and used is not None:
            stat = (_CGROUP / limit_name).parent / "memory.stat"
            available = min(available, max(0, limit - used + _file_cache(stat, stat_prefix)))
    return available


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of file pages, which the kernel counts as used but gives up when memory is short."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = stat.read_text(encoding="ascii").splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in names)


def num_cpu_threads() -> int:
    """Cores this process may use: those it is bound to, or its cgroup's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = _CGROUP / "cpu.max"
    if quota.exists():
        allowed, period = quota.read_text(encoding="ascii").split()
        if allowed != "max":
            cores = min(cores, max(1, -(-int(allowed) // int(period))))
    return cores


def _read(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else None


def available_cuda_bytes(device: torch.device, fraction: float) -> int:
    """What this process may still take of `fraction` of the GPU, activations of the largest pass
    set aside: call it after that pass has run."""
    free, total = torch.cuda.mem_get_info(device)
    # What the largest pass needed beyond what is held now will be needed again.
    headroom = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # 5 % of slack for fragmentation and what libraries allocate on their own.
    return max(0, int(free + cached - headroom - (1.0 - fraction * 0.95) * total))


def cache_size(
    shape: CacheShape, limits: WarmupLimits, available: int, max_position: int
) -> tuple[int, int]:
    """Number of blocks and longest request; ModelError with the numbers if they do not fit."""
    fitting = available // shape.block_bytes
    wanted = limits.max_batch_total_tokens
    if wanted is not None:
        num_blocks = wanted // shape.block_size
        if num_blocks > fitting:
            raise ModelError(
                f"--max-batch-total-tokens {wanted} needs "
                f"{num_blocks * shape.block_bytes / 1e9:.1f} GB of KV cache, but there is room for "
                f"{fitting * shape.block_size} tokens; decrease it"
            )
    else:
        # More than every row at its longest is never used.
        longest = limits.max_total_tokens or max_position
        rows = limits.max_batch_size * -(-longest // shape.block_size)
        num_blocks = min(fitting, rows)
    tokens = num_blocks * shape.block_size
    if limits.max_total_tokens == 1:
        raise ModelError("--max-total-tokens must be at least 2: a prompt token and a new one")
    max_total = limits.max_total_tokens or min(max_position, tokens)
    if max_total > tokens or tokens < 2:
        raise ModelError(
            f"Not enough memory to handle `max_total_tokens={max(max_total, 2)}`: the KV cache has "
            f"room for {tokens} tokens; decrease it or give the server more memory"
        )
    return num_blocks, max_total
