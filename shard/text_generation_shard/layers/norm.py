"""Root-mean-square normalization (Zhang & Sennrich 2019)."""

from torch import Tensor

from text_generation_shard.checkpoint.weights import Parameters


class RMSNorm:
    """x / rms(x) · weight over the last dimension; the mean is taken in float32."""

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self._device, self._eps = parameters.device, eps
        self._size = size
        self.weight = parameters.add(f"{name}.weight", (size,))
        """[size], float32 after loading."""
        parameters.after_load(self._widen)

    def _widen(self) -> None:
        self.weight = self.weight.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., size] → the same shape and dtype."""
        # `reshape` would return a view with gaps between rows, if there is one head.
        rows = hidden.contiguous().view(-1, self._size)
        return self._device.add_norm(rows, None, 1.0, self.weight, self._eps).view(hidden.shape)

    def add(self, hidden: Tensor, delta: Tensor | None, multiplier: float = 1.0) -> Tensor:
        """hidden [T, size] += delta * multiplier, in place; returns the norm of the result."""
        return self._device.add_norm(hidden, delta, multiplier, self.weight, self._eps)
