"""Weights to a device by plain copies."""

from collections.abc import Callable

from torch import Tensor


class PlainCopies:
    """See `WeightCopies`: everything is done at once, by torch, in the thread that asks."""

    matrix_dtype = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See WeightCopies."""
        target.copy_(source)

    def then(self, action: Callable[[], None]) -> None:
        """See WeightCopies."""
        action()
