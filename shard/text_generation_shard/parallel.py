"""The shards of one model: what they tell each other while they compute."""

from typing import Protocol

from torch import Tensor

from text_generation_shard.arrays import Ints


class Collectives(Protocol):
    """What ranks compute together.

    All ranks call the same operations in the same order, with tensors of the same shapes, in their
    device threads. Each operation raises RankError, which names a rank, if that one does not come
    within the step deadline, has given up, or if this process is to stop.
    """

    # As the log and /info call it.
    name: str

    def begin(self, number: int) -> None:
        """The operations from here on belong to the message of this number. What an earlier message
        has left undone, because it failed, is forgotten."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, added in float32 in the order of ranks; `partial` may be
        overwritten."""

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' tensors [..., N] of one shape, side by side: [..., size * N]."""

    def broadcast(self, values: Ints) -> Ints:
        """Rank 0's numbers; the others give as many, which are overwritten."""

    def fail(self, number: int) -> None:
        """This rank has given up the message of this number: the others do not wait for it in
        that one any longer."""

    def stop(self) -> None:
        """From any thread: operations, the one under way too, raise RankError from here on."""


class World:
    """`size` processes that compute the same steps, each with its part of every weight.

    With one rank, each operation returns its argument.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, collectives: Collectives | None = None
    ) -> None:
        assert 0 <= rank < size, "a rank is one of the world's"
        self.rank, self.size = rank, size
        self._collectives = collectives

    @property
    def collectives(self) -> Collectives:
        """Of more than one rank."""
        assert self._collectives is not None, "one rank has nobody to talk to"
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
