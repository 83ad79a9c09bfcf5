"""What ranks compute together, by torch.distributed: the specification of all others."""

import torch
import torch.distributed
from torch import Tensor

from text_generation_shard.arrays import Ints


class GlooCollectives:
    """See `Collectives`. The default group of torch.distributed is set up already."""

    name = "gloo"

    def begin(self, number: int) -> None:
        """See Collectives."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        torch.distributed.all_reduce(partial)
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        torch.distributed.broadcast(torch.from_numpy(values), src=0)
        return values

    def fail(self, number: int) -> None:
        """See Collectives."""

    def stop(self) -> None:
        """See Collectives."""
