"""Matrix products, the only place that knows how weights lie in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.weights import Parameters


class Linear:
    """y = x Wᵀ + b, where W stacks the outputs of several named projections.

    One product over stacked weights (q, k and v; gate and up) reads the input once and makes
    fewer, larger calls.
    """

    def __init__(
        self,
        parameters: Parameters,
        outputs: dict[str, int],
        in_features: int,
        bias: bool = False,
    ) -> None:
        self._weight = parameters.add_stacked(
            {f"{name}.weight": (rows, in_features) for name, rows in outputs.items()}
        )
        self._bias: Tensor | None = None
        if bias:
            self._bias = parameters.add_stacked(
                {f"{name}.bias": (rows,) for name, rows in outputs.items()}
            )
        self._is_packed = False
        parameters.after_load(self._pack)

    def _pack(self) -> None:
        """Bring the weight into oneDNN's own layout, once, where that is faster.

        F.linear reorders a bfloat16 weight on every call; prepacked, the linears of a decode step
        of the 125 M checkpoint take 8.9 instead of 13.8 ms (MEASUREMENTS).
        """
        self._weight, self._is_packed = pack(self._weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, in_features] → [T, sum of outputs]."""
        if self._is_packed:
            return linear_packed(hidden, self._weight, self._bias)
        return F.linear(hidden, self._weight, self._bias)


def pack(weight: Tensor) -> tuple[Tensor, bool]:
    """The weight in oneDNN's layout and True, or as it is and False where that would not pay."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return weight, False
    if not torch._C._has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight, False
    return torch.ops.mkldnn._reorder_linear_weight(weight, None), True


def linear_packed(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden [T, in] times a weight from `pack`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return out
