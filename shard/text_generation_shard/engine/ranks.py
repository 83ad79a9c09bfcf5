"""What several ranks do alike: agree on numbers, fail messages, prove equal choices."""

import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

import torch
from text_generation_process.defaults import (
    CONTEXT_UNIT,
    LEAST_STEP_DEADLINE_ON_GPU_S,
    LEAST_STEP_DEADLINE_S,
    WARMUP_ROWS,
)
from text_generation_proto import pb

from text_generation_shard.device.base import Device
from text_generation_shard.errors import BatchError, OwnError
from text_generation_shard.parallel import World

_T = TypeVar("_T")
# Bytes are exchanged in MiB, which float32 holds exactly up to 2^24.
_UNIT = 1 << 20
# Messages that a router sends before the first of them is answered.
_MOST_AHEAD = 4
_BEHIND = "the step before this one has failed"


def deadline_of_ranks(result: pb.WarmupResponse, limits: pb.WarmupRequest, is_cpu: bool) -> float:
    """Seconds to wait for another rank: at least the time of the largest step, as another rank can
    be late by a part of it."""
    least_s = LEAST_STEP_DEADLINE_S if is_cpu else LEAST_STEP_DEADLINE_ON_GPU_S
    context_ns = result.prefill_context_ns * result.max_total_tokens / CONTEXT_UNIT
    token_ns = result.prefill_token_ns + context_ns
    num_rows = limits.max_batch_size
    decode_ns = result.decode_step_ns * max(1.0, num_rows / WARMUP_ROWS)
    return max(least_s, (decode_ns + token_ns * (limits.max_prefill_tokens + num_rows)) / 1e9)


class Ranks:
    """Carries out messages on this rank while other ranks carry out the same. Owns the outcome of
    the last one. Used in the device thread, with several ranks."""

    def __init__(self, world: World) -> None:
        self._collectives = world.collectives
        # Set if the last message failed: the error type of messages sent ahead of its answer.
        self._error: type[BatchError] | None = None

    def carry_out(self, number: int, work: Callable[[], _T], is_ahead: bool = False) -> _T:
        """The result of `work`. If it fails, other ranks stop waiting for this one in this message.

        is_ahead: it was sent before the previous message was answered. If that one failed, this
        one fails, too: the state of this rank may differ from the others'.
        """
        try:
            self._collectives.begin(number)
            if is_ahead and self._error is not None:
                raise self._error(_BEHIND)
            answer = work()
        except BaseException as error:
            is_alike = isinstance(error, BatchError) and not isinstance(error, OwnError)
            self._error = BatchError if is_alike else OwnError
            if not is_alike:
                self._collectives.fail(number)
            raise
        self._error = None
        return answer

    def skip(self, first: int, end: int) -> None:
        """Messages [first, end) are not carried out here: other ranks stop waiting for this one in
        them. Another rank can only be in one of the first few."""
        self._error = OwnError
        for number in range(first, min(end, first + _MOST_AHEAD)):
            self._collectives.fail(number)


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
