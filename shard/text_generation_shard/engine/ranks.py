"""What several ranks do alike: agree on numbers, prove equal choices."""

import struct
from hashlib import blake2b

import torch
from text_generation_process.defaults import (
    CONTEXT_UNIT,
    LEAST_STEP_DEADLINE_ON_GPU_S,
    LEAST_STEP_DEADLINE_S,
    WARMUP_ROWS,
)
from text_generation_proto import pb

from text_generation_shard.device.base import Device
from text_generation_shard.parallel import World

# Bytes are exchanged in MiB, which float32 holds exactly up to 2^24.
_UNIT = 1 << 20


def deadline_of_ranks(result: pb.WarmupResponse, limits: pb.WarmupRequest, is_cpu: bool) -> float:
    """Seconds to wait for another rank: at least the time of the largest step, as another rank can
    be late by a part of it."""
    least_s = LEAST_STEP_DEADLINE_S if is_cpu else LEAST_STEP_DEADLINE_ON_GPU_S
    context_ns = result.prefill_context_ns * result.max_total_tokens / CONTEXT_UNIT
    token_ns = result.prefill_token_ns + context_ns
    num_rows = limits.max_batch_size
    decode_ns = result.decode_step_ns * max(1.0, num_rows / WARMUP_ROWS)
    return max(least_s, (decode_ns + token_ns * (limits.max_prefill_tokens + num_rows)) / 1e9)


def digest(number: int, found: pb.Generations) -> int:
    """64 bits over a step's choices and its message's number. See StepResponse."""
    counts = found.token_counts or [1] * len(found.request_ids)
    values = (number, *found.request_ids, *counts, *found.token_ids, *found.finish_reasons)
    packed = struct.pack(f"<{len(values)}Q", *values)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def least(world: World, nbytes: int, device: Device) -> int:
    """The least `nbytes` of all ranks, rounded down to MiB with several ranks."""
    if world.size == 1:
        return nbytes
    own = torch.tensor([nbytes // _UNIT], dtype=torch.float32, device=device.torch_device)
    return int(world.all_gather(own).min()) * _UNIT
