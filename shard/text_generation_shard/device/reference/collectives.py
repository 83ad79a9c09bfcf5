"""What ranks compute together, by torch.distributed: the specification of all others."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store

from text_generation_shard.arrays import Ints
from text_generation_shard.errors import RankError
from text_generation_shard.meeting import JOIN_S, Meeting, try_out


class GlooCollectives:
    """See `Collectives`. Owns a group of torch.distributed, and no global one. Whatever fails in it
    is final: what is under way between two processes can not be taken back."""

    name = "gloo"

    def __init__(
        self, store: Store, rank: int, size: int, deadline_s: float, address: str = "localhost"
    ) -> None:
        """All ranks at once. address: of this machine, through which the others come."""
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
        """Of all ranks that meet; they have been tried out."""
        deadline_s = min(JOIN_S, meeting.deadline_s)
        found = cls(meeting.store, meeting.rank, meeting.size, deadline_s, meeting.address)
        # What rank 0 keeps for all is gone with its meeting.
        found._meeting = meeting
        try_out(found, meeting)
        found.wait_at_most(meeting.deadline_s)
        return found

    def wait_at_most(self, seconds: float) -> None:
        """The deadline of operations from here on."""
        self.deadline_s = seconds
        self._group.set_timeout(timedelta(seconds=seconds))

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
        """See Collectives; this rank leaves all others."""
        self.stop()

    def stop(self) -> None:
        """See Collectives."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _parts_of(self, part: Tensor) -> list[Tensor]:
        """All ranks' tensors."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        group = self._group
        if group is None:
            raise RankError(f"this shard has given up (message {self._number})", is_final=True)
        try:
            group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise RankError(
                f"another shard has given up, or did not come within {self.deadline_s:g} s "
                f"(message {self._number}; {str(error).splitlines()[0]})",
                is_final=True,
            ) from error
        return parts
