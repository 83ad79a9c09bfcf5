"""The shards of one model: what they tell each other while they compute."""

import torch
import torch.distributed
from torch import Tensor

from text_generation_shard.arrays import Ints


class World:
    """`size` processes that compute the same steps, each with its part of every weight.

    Promises: all ranks call the same operations in the same order. Rank 0 chooses the tokens, and
    the others get them by `broadcast`. With one rank, each operation returns its argument.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """For more than one rank, the default group of torch.distributed is set up already."""
        assert 0 <= rank < size, "a rank is one of the world's"
        self.rank, self.size = rank, size

    def share(self, count: int, what: str) -> int:
        """How many of `count` things each rank has; ValueError if they can not be divided."""
        if count % self.size:
            raise ValueError(
                f"{count} {what} can not be divided among {self.size} shards; use a number of "
                f"shards that divides {count}"
            )
        return count // self.size

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, which are of one shape; `partial` may be overwritten."""
        if self.size > 1:
            torch.distributed.all_reduce(partial)
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' tensors [..., N] of one shape, side by side: [..., size * N]."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """Rank 0's numbers; the others give as many, which are overwritten."""
        if self.size > 1:
            torch.distributed.broadcast(torch.from_numpy(values), src=0)
        return values
