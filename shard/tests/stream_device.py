"""A device with the runner of a GPU and the arithmetic of the reference: what is right with it, and
wrong on a GPU, is not in how steps are launched and collected."""

from types import SimpleNamespace
from typing import Any

import torch
from text_generation_shard.device.base import DeviceOptions, Model
from text_generation_shard.device.cuda.runner import StreamRunner
from text_generation_shard.device.cuda.uploads import Uploads
from text_generation_shard.device.reference.device import DTYPES, TorchDevice
from text_generation_shard.device.reference.runner import EagerForward
from text_generation_shard.sampling.sampler import Scores, sample
from torch import Tensor


class LateBuffer:
    """Memory of the processor in place of pinned memory. What was sent is there at once, and the
    memory is only free for others when it was waited for."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.is_busy = False

    def wait(self) -> None:
        self.is_busy = False

    def send(self, staged: Tensor, target: Tensor) -> None:
        assert not self.is_busy, "it was written while a copy was under way"
        target.copy_(staged)
        self.is_busy = True
        # Who still reads here reads numbers that were never sent.
        self.memory.fill_(0xAA)


class LateStream:
    """See `Stream`: the processor, whose results can be read when they were waited for."""

    def __init__(self) -> None:
        self._fetched: list[tuple[Tensor, Tensor]] = []

    def mark(self) -> Any:
        begun, self._fetched = self._fetched, []

        def synchronize() -> None:
            for there, found in begun:
                there.copy_(found)

        return SimpleNamespace(synchronize=synchronize)

    def fetch(self, found: Tensor) -> Tensor:
        # No token has this number.
        there = torch.full_like(found, -1e9)
        self._fetched.append((there, found.clone()))
        return there


def begin(scores: Scores, *rest: Any) -> Tensor:
    """See `cuda.sampler.begin`."""
    choice = sample(scores, *rest)
    token_ids, logprobs = torch.from_numpy(choice.token_ids), torch.from_numpy(choice.logprobs)
    return torch.stack((token_ids.double(), logprobs.double(), torch.zeros(len(token_ids))))


class StreamDevice(TorchDevice):
    """See `Device`."""

    runs_behind = True

    def runner(self, model: Model) -> StreamRunner:  # type: ignore[override]
        upload = Uploads(self.torch_device, LateBuffer)
        return StreamRunner(EagerForward(model), LateStream(), upload, begin)


def open_device(options: DeviceOptions) -> StreamDevice:
    """In place of another device."""
    dtype = DTYPES[options.dtype or options.checkpoint_dtype]
    return StreamDevice(torch.device("cpu"), dtype, options)
