"""Copies to a GPU through pinned buffers: weights from a mapped file, and the arrays of a step."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Array, Upload
from text_generation_shard.device.base import WeightCopies
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

# One thread does not saturate the connection to the GPU. Each thread fills one buffer while another
# is copied.
_NUM_THREADS = 4
_NUM_BUFFERS = 2 * _NUM_THREADS
_BUFFER_BYTES = 32 * 2**20
# Most pending copies and actions per thread, so that few matrices are allocated long before they
# are filled.
_STEPS_PER_THREAD = 4


class PinnedBuffer:
    """Pinned host memory, which the GPU reads asynchronously. One thread at a time uses it."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream) -> None:
        """`stream`: the current stream of the loading thread."""
        # [bytes] in uint8.
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._stream = stream
        self._sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the last copy is complete and the memory may be written again."""
        self._sent.synchronize()

    def send(self, staged: Tensor, target: Tensor) -> None:
        """Start copying `staged`, a part of the memory, to `target` on the device; same shape and
        dtype. Later device operations of the loading thread see the result."""
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._sent.record(self._stream)


class StagedCopies(WeightCopies):
    """See `WeightCopies`. Owns its threads, and the buffers that they share.

    A thread reads a piece into the least recently used buffer, converted to the dtype of its
    target. Errors are raised in the order of the copies.
    """

    def __init__(
        self, matrix_dtype: torch.dtype | None, buffers: Sequence[PinnedBuffer], num_threads: int
    ) -> None:
        """At least as many buffers as threads."""
        assert len(buffers) >= num_threads, "no thread waits for another one's buffer"
        self.matrix_dtype = matrix_dtype
        self.nbytes = 0
        """Bytes read from the checkpoint."""
        self._buffer_bytes = min(len(buffer.memory) for buffer in buffers)
        self._buffers: SimpleQueue[PinnedBuffer] = SimpleQueue()
        for buffer in buffers:
            self._buffers.put(buffer)
        # Pending work of the loading thread: wait for a copy, or call an action.
        self._steps: deque[Callable[[], object]] = deque()
        self._most_steps = _STEPS_PER_THREAD * num_threads
        self._torch_threads = torch.get_num_threads()
        # Otherwise torch creates a thread pool for each of them.
        self._threads = ThreadPoolExecutor(
            num_threads, "weights", initializer=torch.set_num_threads, initargs=(1,)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete pending work, unless there is an error; then end the threads and release the
        buffers."""
        try:
            self._finish_steps(0 if error is None else len(self._steps))
        finally:
            self._steps.clear()
            self._threads.shutdown(cancel_futures=True)
            # The number set in the workers also applies to threads started later.
            torch.set_num_threads(self._torch_threads)
            while not self._buffers.empty():
                self._buffers.get().wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See WeightCopies."""
        self.nbytes += source.nbytes
        for piece in _pieces(target, source, self._buffer_bytes // target.dtype.itemsize):
            self._steps.append(self._threads.submit(self._send, *piece).result)
            self._finish_steps(self._most_steps)

    def then(self, action: Callable[[], None]) -> None:
        """See WeightCopies."""
        self._steps.append(action)
        self._finish_steps(self._most_steps)

    def _finish_steps(self, most_left: int) -> None:
        while len(self._steps) > most_left:
            self._steps.popleft()()

    def _send(self, target: Tensor, source: Tensor) -> None:
        """Copy one piece; runs in a worker thread."""
        buffer = self._buffers.get()
        try:
            buffer.wait()
            staged = buffer.memory[: target.nbytes].view(target.dtype).view(target.shape)
            staged.copy_(source)
            buffer.send(staged, target)
        finally:
            self._buffers.put(buffer)


def _pieces(target: Tensor, source: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split two tensors of one shape into matching parts of at most `most` values."""
    if source.numel() <= most:
        yield target, source
    elif rows := most // source[0].numel():
        yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    else:
        for target_row, source_row in zip(target, source, strict=True):
            yield from _pieces(target_row, source_row, most)


@contextmanager
def pinned_copies(
    torch_device: torch.device, matrix_dtype: torch.dtype | None
) -> Iterator[StagedCopies]:
    """Copies to a GPU. Raises ModelError if the buffers can not be allocated. Leaving the context
    releases them."""
    began, stream = time.monotonic(), torch.cuda.current_stream(torch_device)
    try:
        with StagedCopies(matrix_dtype, _pinned_buffers(stream), _NUM_THREADS) as copies:
            yield copies
    finally:
        # torch caches freed pinned memory, and 2.11 has no public function to release it.
        torch._C._host_emptyCache()
    seconds, size = time.monotonic() - began, copies.nbytes / 1e9
    logger.info(
        "loading weights: %.2f GB in %.1f s (%.2f GB/s)", size, seconds, size / max(seconds, 1e-9)
    )


def _pinned_buffers(stream: torch.cuda.Stream) -> list[PinnedBuffer]:
    try:
        return [PinnedBuffer(_BUFFER_BYTES, stream) for _ in range(_NUM_BUFFERS)]
    except RuntimeError as error:
        raise ModelError(
            f"the host can not allocate {_NUM_BUFFERS * _BUFFER_BYTES >> 20} MiB of pinned memory "
            f"to copy weights to the GPU ({str(error).splitlines()[0]}); free host memory"
        ) from error


# Alignment of arrays in an upload, for the widest loads of a kernel.
_ALIGNMENT = 16


def pinned_upload(torch_device: torch.device) -> Upload:
    """An upload of all arrays in one copy, which the host does not wait for. torch reuses the
    pinned memory after the copy."""

    def upload(arrays: Sequence[Array]) -> list[Tensor]:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        is_gpu = torch_device.type == "cuda"
        staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_gpu)
        memory, starts = staged.numpy(), list(accumulate(sizes, initial=0))
        for array, start in zip(arrays, starts, strict=False):
            octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            memory[start : start + array.nbytes] = octets
        sent = staged.to(torch_device, non_blocking=True)
        return [
            sent[start : start + array.nbytes]
            .view(getattr(torch, array.dtype.name))
            .view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]

    return upload
