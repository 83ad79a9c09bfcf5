"""How much memory there is, and how the C allocator keeps it."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from text_generation_shard.device.attention import MAX_GATHER_TOKENS
from text_generation_shard.device.cpu import cgroup
from text_generation_shard.device.reference.kv_cache import CacheShape
from text_generation_shard.engine.runner import LOGPROB_ROWS
from text_generation_shard.engine.step import WarmupLimits
from text_generation_shard.errors import ModelError
from text_generation_shard.models.config import ModelConfig

# What sampling with every parameter takes per choice and vocabulary entry: some float32 and float64
# copies of the scores, and their order.
_SAMPLING_BYTES = 50
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


def return_freed_memory() -> None:
    """Give pages of freed tensors back to the system: after loading, when many of them, of weights
    that have been packed since, will not be needed again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_cpu_bytes() -> int:
    """What this process may still take: the machine's free memory, or its cgroup's rest if less."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = cgroup.memory_limit()
    return available if group is None else min(available, group.free)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a shard's memory goes, in bytes, and in words what stands behind the numbers."""

    weights: int
    cache: int
    blocks: str
    # The largest step there can be.
    activations: int
    largest_step: str
    # What the machine, or this process's share of it, has beside all that.
    left: int

    def lines(self) -> list[str]:
        """The table, line by line."""
        rows = [
            ("weights", self.weights, ""),
            ("KV cache", self.cache, self.blocks),
            ("activations", self.activations, self.largest_step),
            ("graphs", 0, "steps are not recorded"),
            ("left", self.left, ""),
        ]
        return [
            f"memory: {name:<12}{size / 1e9:8.3f} GB  {note}".rstrip() for name, size, note in rows
        ]


def left_bytes(device: torch.device, cache: int, activations: int) -> int:
    """What is there beside a cache that is allocated and a step that is not."""
    if device.type == "cpu":
        # The cache's pages count as free until they are written.
        return max(0, available_cpu_bytes() - cache - activations)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + cached - activations)


def gather_bytes(shape: CacheShape) -> int:
    """What an attention that copies cached keys and values takes at most."""
    return 2 * MAX_GATHER_TOKENS * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def sampling_bytes(config: ModelConfig, limits: WarmupLimits) -> int:
    """What choosing for every row takes at most."""
    return _SAMPLING_BYTES * limits.max_batch_size * config.vocab_size


def activation_bytes(config: ModelConfig, shape: CacheShape, limits: WarmupLimits) -> int:
    """What the largest step takes: as much of inputs as a pass may hold beside all rows that
    decode, then the scores of all, with every way to choose from them."""
    tokens = limits.max_prefill_tokens + limits.max_batch_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The residual, its norm and what is added to it; beside them attention or feed-forward.
    widest = 3 * config.hidden_size + max(heads, 3 * config.intermediate_size)
    passing = tokens * widest * shape.dtype.itemsize
    # Prompt log-probabilities need the scores of some tokens twice while the pass is there.
    prompts = 2 * LOGPROB_ROWS * config.vocab_size * 4
    return max(passing + prompts, sampling_bytes(config, limits))


def available_cuda_bytes(device: torch.device, fraction: float) -> tuple[int, int]:
    """What this process may still take of `fraction` of the GPU, and the activations of the largest
    pass, which are set aside: call it after that pass has run."""
    free, total = torch.cuda.mem_get_info(device)
    # What the largest pass needed beyond what is held now will be needed again.
    headroom = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # 5 % of slack for fragmentation and what libraries allocate on their own.
    return max(0, int(free + cached - headroom - (1.0 - fraction * 0.95) * total)), headroom


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
