"""Copies small host arrays to a GPU without waiting for its computations."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Array
from text_generation_shard.device.cuda.staging import Buffer

# Alignment of arrays in a buffer, for the widest loads of a kernel.
_ALIGNMENT = 16
# A copy waits in the stream for the kernels before it. There are more buffers than two steps have
# uploads, so that the host does not wait for a step while it launches the next one.
_NUM_BUFFERS = 32
_LEAST_BYTES = 1 << 16


class Uploads:
    """Owns a ring of pinned buffers. A buffer is reused after its last copy is complete."""

    def __init__(self, torch_device: torch.device, make_buffer: Callable[[int], Buffer]) -> None:
        """`make_buffer` returns a buffer of the given size in bytes."""
        self._device, self._make_buffer = torch_device, make_buffer
        self._buffers = [make_buffer(_LEAST_BYTES) for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def __call__(self, arrays: Sequence[Array]) -> list[Tensor]:
        """See Device.upload: all in one copy."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._free_buffer(end)
        staged = buffer.memory[:end]
        memory = staged.numpy()
        for array, start in zip(arrays, starts, strict=True):
            octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            memory[start : start + array.nbytes] = octets
        sent = torch.empty(end, dtype=torch.uint8, device=self._device)
        buffer.send(staged, sent)
        return [
            sent[start : start + array.nbytes]
            .view(getattr(torch, array.dtype.name))
            .view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _free_buffer(self, nbytes: int) -> Buffer:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        buffer = self._buffers[self._turn]
        buffer.wait()
        if len(buffer.memory) < nbytes:
            buffer = self._buffers[self._turn] = self._make_buffer(1 << (nbytes - 1).bit_length())
        return buffer
