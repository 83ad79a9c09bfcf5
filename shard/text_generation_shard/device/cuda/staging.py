"""Weights from the pages of a file to a GPU: through a few buffers, by a few threads."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

# One thread reads a few GB/s, and so four are as fast as the connection to most GPUs. Each has a
# buffer to fill while another is copied from.
_NUM_THREADS = 4
_NUM_BUFFERS = 2 * _NUM_THREADS
_BUFFER_BYTES = 32 * 2**20
# Copies and actions that wait, for each thread: matrices are not made long before they are filled.
_STEPS_PER_THREAD = 4


class Buffer(Protocol):
    """Memory of the host that a device copies from. One thread at a time uses it."""

    # [bytes] in uint8.
    memory: Tensor

    def wait(self) -> None:
        """Until what was sent has left the memory, which may then be written again."""

    def send(self, staged: Tensor, target: Tensor) -> None:
        """Begin to copy `staged`, which lies in the memory, to `target` on the device, of the same
        shape and type. What the loading thread asks of the device later finds it there."""


class StagedCopies:
    """See `WeightCopies`. Owns threads, from entering to leaving, and the buffers they share.

    A thread reads a piece into the buffer that was sent the longest time ago, where it gets the
    type of its target. Errors of the threads are raised in the order of the copies.
    """

    def __init__(
        self, matrix_dtype: torch.dtype | None, buffers: Sequence[Buffer], num_threads: int
    ) -> None:
        """At least as many buffers as threads, each with room for any number."""
        assert len(buffers) >= num_threads, "no thread waits for another one's buffer"
        self.matrix_dtype = matrix_dtype
        self.nbytes = 0
        """What was read of the checkpoint."""
        self._buffer_bytes = min(len(buffer.memory) for buffer in buffers)
        self._buffers: SimpleQueue[Buffer] = SimpleQueue()
        for buffer in buffers:
            self._buffers.put(buffer)
        # What the loading thread does later: wait for a copy, or call an action.
        self._steps: deque[Callable[[], object]] = deque()
        self._most_steps = _STEPS_PER_THREAD * num_threads
        self._torch_threads = torch.get_num_threads()
        # torch would give each of them a pool of threads of its own.
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
        """Without an error: do what is left to do. Then end the threads and give the buffers up."""
        try:
            self._finish_steps(0 if error is None else len(self._steps))
        finally:
            self._steps.clear()
            self._threads.shutdown(cancel_futures=True)
            # The number is kept for later threads too.
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
        """What a thread does for a piece."""
        buffer = self._buffers.get()
        try:
            buffer.wait()
            staged = buffer.memory[: target.nbytes].view(target.dtype).view(target.shape)
            staged.copy_(source)
            buffer.send(staged, target)
        finally:
            self._buffers.put(buffer)


def _pieces(target: Tensor, source: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of two tensors of one shape, with `most` numbers or less."""
    if source.numel() <= most:
        yield target, source
    elif rows := most // source[0].numel():
        yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    else:
        for target_row, source_row in zip(target, source, strict=True):
            yield from _pieces(target_row, source_row, most)


class PinnedBuffer:
    """See `Buffer`. Memory that the GPU reads by itself, while the host goes on."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream) -> None:
        """`stream`: in which the loading thread computes, and so sees what was sent."""
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._stream = stream
        self._sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See Buffer."""
        self._sent.synchronize()

    def send(self, staged: Tensor, target: Tensor) -> None:
        """See Buffer."""
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._sent.record(self._stream)


@contextmanager
def pinned_copies(
    torch_device: torch.device, matrix_dtype: torch.dtype | None
) -> Iterator[StagedCopies]:
    """Copies to a GPU. ModelError if there is no memory for the buffers; none of it is kept."""
    began, stream = time.monotonic(), torch.cuda.current_stream(torch_device)
    try:
        with StagedCopies(matrix_dtype, _pinned_buffers(stream), _NUM_THREADS) as copies:
            yield copies
    finally:
        # torch keeps pinned memory that was freed, and has no public way to give it back in 2.11.
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
            f"the host gives no {_NUM_BUFFERS * _BUFFER_BYTES >> 20} MiB of pinned memory, through "
            f"which weights go to the GPU ({str(error).splitlines()[0]}); free memory of the host"
        ) from error
