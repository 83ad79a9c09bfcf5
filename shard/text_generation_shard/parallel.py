"""The ranks of one model, and the operations with which they exchange tensors."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from text_generation_shard.arrays import Ints


class Collectives(Protocol):
    """Operations of all ranks together.

    All ranks call the same operations in the same order, with tensors of the same shapes, in their
    device threads. An operation raises RankError, which names a rank, if that rank misses the step
    deadline or has failed the message, or if this process stops.
    """

    # Shown in the log and /info.
    name: str

    def wait_at_most(self, seconds: float) -> float:
        """Set the deadline for other ranks; returns the deadline in force, which some
        implementations can not change."""

    def begin(self, number: int) -> None:
        """Later operations belong to this message. Unfinished operations of an earlier message,
        which has failed, are dropped."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, added in float32 in the order of ranks; `partial` may be
        overwritten."""

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' tensors [..., N] of one shape, concatenated: [..., size * N]."""

    def broadcast(self, values: Ints) -> Ints:
        """Rank 0's numbers; other ranks pass an array of the same size, which is overwritten."""

    def fail(self, number: int) -> None:
        """This rank has failed the message: other ranks stop waiting for it in this message."""

    def stop(self) -> None:
        """From any thread: current and later operations raise RankError."""


class World:
    """`size` processes that compute the same steps, each with a part of the weights.

    With one rank, each operation returns its argument.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Collectives | None = None,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """meet: waits for all ranks without limit, while they load; called once."""
        assert 0 <= rank < size, "a rank is below the size"
        self.rank, self.size, self.meet = rank, size, meet
        self._collectives = collectives

    @property
    def collectives(self) -> Collectives:
        """The operations; only with several ranks."""
        assert self._collectives is not None, "one rank has no collectives"
        return self._collectives

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        return partial if self.size == 1 else self.collectives.all_reduce(partial)

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        return part if self.size == 1 else self.collectives.all_gather(part)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        return values if self.size == 1 else self.collectives.broadcast(values)
