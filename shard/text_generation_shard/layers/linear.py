"""Projections of hidden states."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from text_generation_shard.checkpoint.weights import Parameters, Split
from text_generation_shard.device.base import Activation, Matrix
from text_generation_shard.parallel import World


class Linear:
    """y = x Wᵀ + b, where W stacks the outputs of several named projections.

    One product over stacked weights (q, k and v; gate and up) reads the input once and makes
    fewer, larger calls. Each rank has its part of the outputs, or of the inputs: then the sum over
    all ranks is taken.
    """

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        outputs: Mapping[str, Sequence[int]],
        in_features: int,
        split: Split = Split.NONE,
        bias: bool = False,
        gate: Activation | None = None,
    ) -> None:
        """outputs: of each name in the checkpoint, the sizes of the projections that it stacks.
        With a `gate` the first half of the outputs goes through it and is multiplied with the
        second."""
        self.matrix: Matrix
        """Once it is loaded."""
        self._world, self._split = world, split
        self._device, self._quantize, self._gate = parameters.device, parameters.quantize, gate
        self.bias: Tensor | None = None
        if bias:
            sections = {f"{name}.bias": sizes for name, sizes in outputs.items()}
            whole = parameters.add_bias(sections, split)
            # A bias is added once to the sum over all ranks.
            if split is not Split.INPUTS or world.rank == 0:
                self.bias = whole
        sections = {f"{name}.weight": sizes for name, sizes in outputs.items()}
        parameters.add_matrix(sections, in_features, split, self._receive)

    def _receive(self, weight: Tensor) -> Matrix:
        if self._gate is None:
            self.matrix = self._device.matrix(weight, self._quantize)
        else:
            has_bias = self.bias is not None
            self.matrix = self._device.gated_matrix(weight, self._quantize, self._gate, has_bias)
        return self.matrix

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, in_features] → [T, sum of outputs], or half of them behind a gate."""
        out = self.matrix(hidden, self.bias)
        return self._world.all_reduce(out) if self._split is Split.INPUTS else out
