"""Devices with a GPU's runner and CPU arithmetic, which test how steps are launched and collected
without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from text_generation_shard.device.base import DeviceOptions, ForwardBatch, Model
from text_generation_shard.device.cuda.runner import Recorder, Stream, StreamRunner
from text_generation_shard.device.cuda.staging import pinned_upload
from text_generation_shard.device.reference.device import DTYPES, Device
from text_generation_shard.device.reference.runner import Forward
from text_generation_shard.sampling import Choice, Sampler, Scores, sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LateStream(Stream):
    """CPU tensors, whose results are readable only after a wait."""

    def __init__(self) -> None:
        self._fetched: list[tuple[Tensor, Tensor]] = []
        self.num_recorded = 0

    def mark(self) -> Callable[[], None]:
        begun, self._fetched = self._fetched, []

        def synchronize() -> None:
            for there, found in begun:
                there.copy_(found)

        return synchronize

    def fetch(self, found: Tensor) -> Tensor:
        # No valid token id.
        there = torch.full_like(found, -1e9)
        self._fetched.append((there, found.clone()))
        return there

    def recorder(self) -> Recorder:
        return self._record

    def _record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        with Recording() as recording:
            work()
        return recording.replay


class Recording(TorchDispatchMode):
    """Acts like a CUDA graph: operators on the memory of the recording. Values of Python, numpy and
    the host stay those of the recording."""

    def __init__(self) -> None:
        super().__init__()
        self._operators: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_memory(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        own = [item for item in tree_leaves(found) if isinstance(item, Tensor)]
        is_view = bool(own) and all(_memory(item) in given for item in own)
        if not is_view or func._schema.is_mutable:
            self._operators.append((func, args, kwargs or {}, [] if is_view else own))
        return found

    def replay(self) -> None:
        for func, args, kwargs, own in self._operators:
            found = [
                item for item in tree_leaves(func(*args, **kwargs)) if isinstance(item, Tensor)
            ]
            for there, new in zip(own, found, strict=bool(own)):
                there.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CheckedForward:
    """Wraps a `Forward`, and checks that no input was read too early, because kernels would read at
    any address."""

    def __init__(self, own: Forward) -> None:
        self._own = own

    def hidden(self, batch: ForwardBatch) -> Tensor:
        return self._own.hidden(self._checked(batch))

    def scores(self, batch: ForwardBatch) -> Tensor:
        return self._own.scores(self._checked(batch))

    def _checked(self, batch: ForwardBatch) -> ForwardBatch:
        assert int(batch.input_ids.min()) >= 0, "every input is a token"
        # As the CPU kernels expect them.
        return replace(batch, block_tables=batch.block_tables.long())


class StreamDevice:
    """Wraps a `Device`, with another runner and other uploads."""

    runs_behind = True
    num_spare_blocks = 1

    def __init__(
        self,
        own: Device,
        sampler: Sampler[Choice] = sample,
        cuda_graphs: tuple[int, ...] | None = (),
    ) -> None:
        """cuda_graphs: see DeviceOptions; for devices with torch's operators."""
        self._own, self._sampler, self._cuda_graphs = own, sampler, cuda_graphs
        self.upload = pinned_upload(own.torch_device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def runner(self, model: Model) -> Any:
        plain: Any = self._own.runner(model)
        forward, stream = CheckedForward(plain._forward), LateStream()
        return StreamRunner(
            model,
            forward,
            self._cuda_graphs,
            stream,
            self._begin,
            self.torch_device,
            self.upload,
        )

    def _begin(self, scores: Scores, *rest: Any) -> Tensor:
        """See `cuda.sampler.begin`."""
        choice = self._sampler(scores, *rest)
        columns = (choice.token_ids, choice.logprobs, np.zeros(len(choice.token_ids)))
        return torch.from_numpy(np.stack(columns).astype(np.float64))


def stream_over(own: Device, sampler: Sampler[Choice] = sample) -> Device:
    """Wrap the device `own`, which keeps its arithmetic, with a GPU's runner."""
    return cast(Device, StreamDevice(own, sampler))


def open_device(options: DeviceOptions) -> Device:
    """Replace a device by the reference."""
    dtype = DTYPES[options.dtype or options.checkpoint_dtype]
    own = Device(torch.device("cpu"), dtype, options)
    return cast(Device, StreamDevice(own, cuda_graphs=options.cuda_graphs))
