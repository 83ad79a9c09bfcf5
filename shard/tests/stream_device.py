"""Devices with the runner of a GPU and the arithmetic of the processor: what is right with them and
wrong on a GPU is not in how steps are launched and collected."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from text_generation_shard.device.base import Device, DeviceOptions, ForwardBatch, Model
from text_generation_shard.device.cuda.runner import StreamRunner
from text_generation_shard.device.cuda.uploads import Uploads
from text_generation_shard.device.reference.device import DTYPES, TorchDevice
from text_generation_shard.device.reference.runner import Forward
from text_generation_shard.sampling.sampler import Choice, Sampler, Scores, sample
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


class CheckedForward:
    """See `Forward`: another one, which is given nothing that was read too early. Kernels would
    read anywhere."""

    def __init__(self, own: Forward) -> None:
        self._own = own

    def hidden(self, batch: ForwardBatch) -> Tensor:
        self._check(batch)
        return self._own.hidden(batch)

    def scores(self, batch: ForwardBatch) -> Tensor:
        self._check(batch)
        return self._own.scores(batch)

    def _check(self, batch: ForwardBatch) -> None:
        assert int(batch.input_ids.min()) >= 0, "every input is a token"


class StreamDevice:
    """See `Device`: another one, but for its runner and what goes up to it."""

    runs_behind = True

    def __init__(self, own: Device, sampler: Sampler[Choice] = sample) -> None:
        self._own, self._sampler = own, sampler
        self.upload = Uploads(own.torch_device, LateBuffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def runner(self, model: Model) -> Any:
        plain: Any = self._own.runner(model)
        forward = CheckedForward(plain._forward)
        return StreamRunner(forward, LateStream(), self.upload, self._begin)

    def _begin(self, scores: Scores, *rest: Any) -> Tensor:
        """See `cuda.sampler.begin`."""
        choice = self._sampler(scores, *rest)
        columns = (choice.token_ids, choice.logprobs, np.zeros(len(choice.token_ids)))
        return torch.from_numpy(np.stack(columns).astype(np.float64))


def stream_over(own: Device, sampler: Sampler[Choice] = sample) -> Device:
    """The device `own`, which keeps its arithmetic and gets the runner of a GPU."""
    return cast(Device, StreamDevice(own, sampler))


def open_device(options: DeviceOptions) -> Device:
    """In place of another device: the reference."""
    dtype = DTYPES[options.dtype or options.checkpoint_dtype]
    return stream_over(TorchDevice(torch.device("cpu"), dtype, options))
