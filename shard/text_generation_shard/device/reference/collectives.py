"""Collective operations by torch.distributed: the specification of the other ones."""

from datetime import timedelta
from typing import Any

import torch
from text_generation_process.defaults import MASTER_ADDR
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store

from text_generation_shard.arrays import Ints
from text_generation_shard.errors import RankError
from text_generation_shard.meeting import JOIN_S, Meeting, try_out


class GlooCollectives:
    """See `Collectives`. Owns a process group of torch.distributed; there is no global one. Every
    failure is final, because an operation between two processes can not be undone."""

    name = "gloo"

    def __init__(
        self, store: Store, rank: int, size: int, deadline_s: float, address: str = MASTER_ADDR
    ) -> None:
        """All ranks call this at the same time. address: where this rank listens for the others."""
        gloo: Any = _distributed_c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=deadline_s)
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self._group: Any = gloo(store, rank, size, options)
        self._number = 0
        self._meeting: Meeting | None = None

    @classmethod
    def meet(cls, meeting: Meeting) -> "GlooCollectives":
        """Connect all ranks of a meeting; returns after a successful trial operation."""
        deadline_s = min(JOIN_S, meeting.deadline_s)
        found = cls(meeting.store, meeting.rank, meeting.size, deadline_s, meeting.address)
        # Rank 0 serves the store as long as its meeting exists.
        found._meeting = meeting
        try_out(found, meeting)
        found.wait_at_most(meeting.deadline_s)
        return found

    def wait_at_most(self, seconds: float) -> float:
        """See Collectives."""
        self.deadline_s = seconds
        self._group.set_timeout(timedelta(seconds=seconds))
        return seconds

    def begin(self, number: int) -> None:
        """See Collectives."""
        self._number = number

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        parts = self._parts_of(partial.float())
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(partial.dtype)

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        return torch.cat(self._parts_of(part), dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        values[...] = self._parts_of(torch.from_numpy(values))[0].numpy()
        return values

    def fail(self, number: int) -> None:
        """See Collectives: this rank leaves the group."""
        self.stop()

    def stop(self) -> None:
        """See Collectives."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _parts_of(self, part: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        group = self._group
        if group is None:
            raise RankError(
                f"this shard has left the group (message {self._number})", is_final=True
            )
        try:
            group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise RankError(
                f"another shard has failed or did not answer within {self.deadline_s:g} s "
                f"(message {self._number}; {str(error).splitlines()[0]})",
                is_final=True,
            ) from error
        return parts
