"""Synchronous copies of weights to a device."""

from collections.abc import Callable

from torch import Tensor


class PlainCopies:
    """See `WeightCopies`: copies and actions run at once, in the calling thread."""

    matrix_dtype = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See WeightCopies."""
        target.copy_(source)

    def then(self, action: Callable[[], None]) -> None:
        """See WeightCopies."""
        action()
