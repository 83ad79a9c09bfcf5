"""Collective operations of ranks on one machine, through shared memory."""

import json
import os
from typing import Final
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints
from text_generation_shard.device.cpu import host
from text_generation_shard.device.cpu.kernels import exchange
from text_generation_shard.device.cpu.kernels.vector import tensor_address
from text_generation_shard.errors import ModelError, RankError
from text_generation_shard.parallel import JOIN_S, Rendezvous, try_out

# Bytes of the launch's name at the start of the memory.
_NAME_BYTES: Final = 32
_MOST_OPERATIONS: Final = 1 << exchange.COUNT_BITS
# Slots are whole pages, so that two ranks never write to one cache line.
_PAGE_BYTES: Final = 4096
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def shared_memory(rendezvous: Rendezvous, nbytes: int) -> Tensor:
    """Memory that all ranks share. It has no name in the file system; the system frees it with the
    last process, even after a kill.

    All ranks call this at the same time. All of the memory is allocated here. Raises ModelError if
    there is too little; RankError if another rank fails."""
    descriptor, sent = -1, ""
    try:
        if rendezvous.rank == 0:
            descriptor = _create(nbytes, rendezvous.size)
            os.pwrite(descriptor, name := uuid4().hex.encode(), 0)
            sent = json.dumps([os.getpid(), descriptor, name.decode()])
        process, number, name = json.loads(rendezvous.gather("shared memory", sent)[0])
        memory = _map(f"/proc/{process}/fd/{number}", name, nbytes)
        rendezvous.all_here("shared memory of all")
        return memory
    except ModelError as error:
        rendezvous.fail(str(error))
        raise
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _create(nbytes: int, size: int) -> int:
    """File descriptor of new memory, filled with zeros."""
    free = host.free_bytes()
    lack = (
        f"{size} shards need {nbytes / 2**20:.0f} MiB of shared memory to exchange results, "
        "and {} are free: stop other processes, raise the container's memory limit, or use "
        "a smaller --num-shard"
    )
    if nbytes > free:
        raise ModelError(lack.format(f"{free / 2**20:.0f} MiB"))
    descriptor = os.memfd_create("text-generation-shards")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise ModelError(lack.format(f"fewer ({error.strerror})")) from error
    return descriptor


def _map(path: str, name: str, nbytes: int) -> Tensor:
    """Map the memory behind a descriptor of another process."""
    try:
        if os.stat(path).st_size < nbytes:
            raise ModelError(f"{path} is not the shared memory of this launch: start it again")
        found = torch.from_file(path, True, nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"the shards' shared memory can not be opened at {path} ({error}): all shards must "
            "run as the same user in the same container"
        ) from error
    if bytes(found[:_NAME_BYTES].tolist()) != name.encode():
        raise ModelError(f"{path} is the shared memory of another launch: start this one again")
    return found


class SharedMemoryCollectives:
    """See `Collectives`. Owns this rank's message number and operation count. Compiled code that
    runs operations itself reserves their words (`reserve`), waits by `exchange`, and reports its
    status (`check`)."""

    name = "shared memory"

    def __init__(
        self, memory: Tensor, rank: int, size: int, slot_bytes: int, deadline_s: float
    ) -> None:
        """memory: `memory_bytes` bytes, shared by all ranks."""
        self.rank, self.size = rank, size
        self._memory = memory
        self._stop = np.zeros(1, np.int64)
        start, slot_bytes = tensor_address(memory, torch.uint8), whole_pages(slot_bytes)
        head_bytes = _head_bytes(size)
        self.exchange = np.zeros(1, exchange.EXCHANGE)
        """For compiled code."""
        own = self.exchange[0]
        own["lines"], own["slots"] = start + exchange.HEAD_BYTES, start + head_bytes
        own["slot_bytes"], own["rank"], own["size"] = slot_bytes, rank, size
        own["stop"] = self._stop.ctypes.data
        self.wait_at_most(deadline_s)
        self._slots = memory[head_bytes : memory_bytes(size, slot_bytes)].view(size, 2, slot_bytes)
        self._number, self._count = 0, 0
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def meet(cls, rendezvous: Rendezvous, slot_bytes: int) -> "SharedMemoryCollectives":
        """Connect all ranks of a rendezvous, each of which sends at most `slot_bytes` at once;
        returns after a successful trial operation."""
        memory = shared_memory(rendezvous, memory_bytes(rendezvous.size, slot_bytes))
        deadline_s = min(JOIN_S, rendezvous.deadline_s)
        found = cls(memory, rendezvous.rank, rendezvous.size, slot_bytes, deadline_s)
        # Rank 0 serves the store as long as its rendezvous exists.
        found._rendezvous = rendezvous
        try_out(found, rendezvous)
        found.wait_at_most(rendezvous.deadline_s)
        return found

    def wait_at_most(self, seconds: float) -> float:
        """See Collectives; does not affect an operation in progress."""
        self.deadline_s = seconds
        self.exchange["deadline_ns"] = int(seconds * 1e9)
        return seconds

    def begin(self, number: int) -> None:
        """See Collectives."""
        assert 0 <= number < 1 << 62 - exchange.COUNT_BITS, "a word has 64 bits"
        self._number, self._count = number, 0

    def reserve(self, count: int) -> int:
        """The first of `count` consecutive words for the next operations."""
        if self._count == 0:
            # No rank writes data of a message before all ranks have finished the previous one.
            self._exchange(self._word())
        first = self._word() + 1
        self._count += count
        assert self._count < _MOST_OPERATIONS, "operations of one message have words"
        return first

    def check(self, status: int) -> None:
        """Raise the RankError of a status; see `exchange.await_rank`."""
        reason, rank = status & 3, status >> 2
        if reason == exchange.ARRIVED:
            return
        where = f"message {self._number}"
        if reason == exchange.LATE:
            raise RankError(
                f"shard {rank} did not come within {self.deadline_s:g} s ({where})", is_final=True
            )
        self.fail(self._number)
        if reason == exchange.STOPPED:
            raise RankError(
                f"this shard is stopping, and does not wait for shard {rank} ({where})",
                is_final=True,
            )
        raise RankError(f"shard {rank} has aborted {where}", is_final=False)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        assert partial.dtype in _FLOATS, "sums are of numbers with a fraction"
        flat = partial.contiguous().view(-1)
        for piece in torch.split(flat, self._slots.shape[2] // 4):
            parts = self._parts(piece.float())
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            piece.copy_(total)
        return flat.view(partial.shape)

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        flat = part.contiguous().view(-1).view(torch.uint8)
        found = torch.empty(self.size, *part.shape, dtype=part.dtype)
        taken = found.view(self.size, part.numel()).view(torch.uint8)
        pieces = torch.split(flat, self._slots.shape[2])
        for piece, target in zip(pieces, torch.split(taken, self._slots.shape[2], 1), strict=True):
            target.copy_(self._parts(piece))
        return torch.cat(list(found), dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        flat = torch.from_numpy(np.ascontiguousarray(values)).view(-1)
        for piece in torch.split(flat, self._slots.shape[2] // 8):
            piece.copy_(self._parts(piece)[0])
        values[...] = flat.numpy().reshape(values.shape)
        return values

    def _parts(self, own: Tensor) -> Tensor:
        """The tensors [size, n] of all ranks, which each call this with `own` [n]; valid until the
        next operation but one."""
        word = self.reserve(1)
        parts = self._slots[:, word & 1, : own.nbytes].view(own.dtype)
        parts[self.rank].copy_(own)
        self._exchange(word)
        return parts

    def fail(self, number: int) -> None:
        """See Collectives."""
        exchange.abort_message(self.exchange, number)

    def stop(self) -> None:
        """See Collectives."""
        self._stop[0] = 1

    def _word(self) -> int:
        return (self._number << exchange.COUNT_BITS) + self._count

    def _exchange(self, word: int) -> None:
        self.check(exchange.exchange_word(self.exchange, word))


def memory_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of the memory that `size` ranks share."""
    return _head_bytes(size) + 2 * size * whole_pages(slot_bytes)


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _head_bytes(size: int) -> int:
    return whole_pages(exchange.HEAD_BYTES + size * exchange.BYTES_OF_RANK)
