"""Collective operations by NCCL; each rank has one GPU."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from text_generation_shard.arrays import Ints
from text_generation_shard.errors import RankError
from text_generation_shard.parallel import Rendezvous, try_out


class NcclCollectives:
    """See `Collectives`. Owns a process group of torch.distributed; there is no global one.

    Operations run in the current stream and do not block the host, so a CUDA graph may record them.
    Ranks exchange sums rounded to the tensors' dtype; all ranks get the same bits. If an operation
    exceeds the deadline, the group's watchdog thread ends this process. It does not see operations
    inside a graph; there the step's own deadline applies.
    """

    name = "nccl"

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """All ranks call this at the same time. device: the GPU of this rank."""
        nccl: Any = _distributed_c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=rendezvous.deadline_s)
        self.rank, self.size, self._device = rendezvous.rank, rendezvous.size, device
        self._group: Any = nccl(rendezvous.store, rendezvous.rank, rendezvous.size, options)
        self._number = 0
        self._deadline_s = rendezvous.deadline_s
        # Rank 0 serves the store as long as its rendezvous exists.
        self._rendezvous = rendezvous

    @classmethod
    def meet(cls, rendezvous: Rendezvous, device: torch.device) -> "NcclCollectives":
        """Connect all ranks of a rendezvous; returns after a successful trial operation."""
        found = cls(rendezvous, device)
        try_out(found, rendezvous, str(device))
        return found

    def wait_at_most(self, seconds: float) -> float:
        """See Collectives: the deadline of an NCCL group can not be changed."""
        return self._deadline_s

    def begin(self, number: int) -> None:
        """See Collectives."""
        self._number = number

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        partial = partial.contiguous()
        self._wait(lambda group: group.allreduce([partial]))
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([parts], [part]))
        return torch.cat(parts, dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        sent = torch.from_numpy(values).to(self._device)
        self._wait(lambda group: group.broadcast(sent, 0))
        values[...] = sent.cpu().numpy()
        return values

    def fail(self, number: int) -> None:
        """See Collectives; final for all ranks, because operations in a stream can not be
        undone."""
        self.stop()

    def stop(self) -> None:
        """See Collectives; operations in progress are aborted."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _wait(self, operation: Any) -> None:
        """Start an operation of the group; the current stream waits for it, the host does not."""
        group = self._group
        if group is None:
            raise RankError(
                f"this shard has left the group (message {self._number})", is_final=True
            )
        try:
            operation(group).wait()
        except RuntimeError as error:
            raise RankError(
                f"another shard has failed or did not answer (message {self._number}; "
                f"{str(error).splitlines()[0]})",
                is_final=True,
            ) from error
