"""What ranks compute together, each on its GPU, by NCCL."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from text_generation_shard.arrays import Ints
from text_generation_shard.errors import RankError
from text_generation_shard.meeting import Meeting, try_out


class NcclCollectives:
    """See `Collectives`. Owns a group of torch.distributed, and no global one.

    Operations are put into the current stream, in which nobody waits for them: a CUDA graph may
    record them. Sums are rounded to the tensors' own type between ranks; all ranks get the same
    bits. An operation that does not end within the deadline is noticed by the group's own thread,
    which ends this process; of one in a graph it knows nothing, and who waits for the step does.
    """

    name = "nccl"

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """All ranks at once; device: this rank's."""
        nccl: Any = _distributed_c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=meeting.deadline_s)
        self.rank, self.size, self._device = meeting.rank, meeting.size, device
        self._group: Any = nccl(meeting.store, meeting.rank, meeting.size, options)
        self._number = 0
        # What rank 0 keeps for all is gone with its meeting.
        self._meeting = meeting

    @classmethod
    def meet(cls, meeting: Meeting, device: torch.device) -> "NcclCollectives":
        """Of all ranks that meet; they have been tried out."""
        found = cls(meeting, device)
        try_out(found, meeting, str(device))
        return found

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
        """See Collectives; it is final for all: what is in a stream can not be taken back."""
        self.stop()

    def stop(self) -> None:
        """See Collectives; what is under way ends."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _wait(self, operation: Any) -> None:
        """Have the current stream wait for an operation of the group."""
        group = self._group
        if group is None:
            raise RankError(f"this shard has given up (message {self._number})", is_final=True)
        try:
            operation(group).wait()
        except RuntimeError as error:
            raise RankError(
                f"another shard has given up, or did not come (message {self._number}; "
                f"{str(error).splitlines()[0]})",
                is_final=True,
            ) from error
