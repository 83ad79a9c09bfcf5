"""What several ranks must do alike: agree on numbers, give up messages, prove what they chose."""

import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

import torch

from text_generation_shard.device.base import Device
from text_generation_shard.engine.step import StepOutput
from text_generation_shard.errors import BatchError, OwnError
from text_generation_shard.parallel import World

_T = TypeVar("_T")
# float32 holds whole numbers up to 2^24 of these.
_UNIT = 1 << 20
# Messages that a router sends before the first of them is answered.
_MOST_AHEAD = 4
_BEHIND = "the step before this one has failed"


class Ranks:
    """Carries out messages on this rank while the others carry out the same. Owns how the last one
    ended. Used in the device thread."""

    def __init__(self, world: World) -> None:
        """Of several ranks."""
        self._collectives = world.collectives
        # If the last one failed: the error of a message behind it.
        self._error: type[BatchError] | None = None

    def carry_out(self, number: int, work: Callable[[], _T], is_ahead: bool = False) -> _T:
        """What `work` answers. If it fails, no other rank waits for this one in that message.

        is_ahead: it was sent before the message before it was answered. If that one has failed it
        fails, too: this rank may not have what the others do.
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

    def pass_over(self, first: int, end: int) -> None:
        """Messages from `first` on, before `end`, are not carried out here: nobody is to wait for
        this rank in them. The others are in one of the first, if in any."""
        self._error = OwnError
        for number in range(first, min(end, first + _MOST_AHEAD)):
            self._collectives.fail(number)


def digest(number: int, output: StepOutput) -> int:
    """64 bits of what a step has chosen; `number`: of its message. See StepResponse."""
    counts = output.token_counts or [1] * len(output.request_ids)
    values = (number, *output.request_ids, *counts, *output.token_ids, *output.finish_reasons)
    packed = struct.pack(f"<{len(values)}Q", *values)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def least(world: World, nbytes: int, device: Device) -> int:
    """The least of all ranks' bytes, rounded down to MiB where there are several."""
    if world.size == 1:
        return nbytes
    own = torch.tensor([nbytes // _UNIT], dtype=torch.float32, device=device.torch_device)
    return int(world.all_gather(own).min()) * _UNIT
