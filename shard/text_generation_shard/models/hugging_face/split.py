"""This rank's part of each weight, by the plan that transformers has for a class of models."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from text_generation_shard.device.base import ALL
from text_generation_shard.errors import UnsupportedError
from text_generation_shard.models.hugging_face.products import are_experts, expert_names
from text_generation_shard.parallel import World

# Kinds of a plan. A rank has some outputs, which stay there or are gathered; or some inputs, which
# come alone or with those of other ranks, and the results are summed.
_LOCAL = ("colwise", "packed_colwise")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_CUT = ("rowwise_split_input", "rowwise_rep")
_SUMMED = ("rowwise", *_CUT)
# Each rank has all. That results of experts are summed follows from the kind of their weights.
_WHOLE = (
    *("embedding_rowwise", "mla_kv_a_proj", "moe_tp_experts", "replicate"),
    "replicated_with_grad_allreduce",
)


def plan_of(text: Any, model_class: Any) -> dict[str, str]:
    """The kinds of modules and parameters, by name, with * for numbers."""
    base, own = getattr(text, "base_model_tp_plan", None), getattr(model_class, "_tp_plan", None)
    prefix = model_class.base_model_prefix
    return {f"{prefix}.{name}": kind for name, kind in (base or {}).items()} | (own or {})


def check_plan(plan: Mapping[str, str], name: str) -> None:
    """UnsupportedError: a model of this class can not be split among ranks."""
    kinds, known = {*plan.values()}, {*_LOCAL, *_GATHERED, *_SUMMED, *_WHOLE}
    if kinds - known:
        raise UnsupportedError(
            f"transformers' plan for {name} has parts of the kind "
            f"{', '.join(sorted(kinds - known))}, which are not supported; use --num-shard 1"
        )
    if not kinds & {*_LOCAL, *_SUMMED}:
        raise UnsupportedError(
            f"transformers has no plan that splits the layers of {name}; use --num-shard 1"
        )


class Split:
    """What this rank has of weights [outputs, inputs], by the name of their module, or of the
    parameter of experts. One rank has all."""

    def __init__(self, plan: Mapping[str, str], world: World) -> None:
        self.world, self._plan = world, plan if world.size > 1 else {}

    def check(self, model: Any, packs: Callable[[Any, str], bool]) -> None:
        """UnsupportedError: the model can not be split among so many ranks. packs: whether the
        parameter of this name becomes a matrix of the device."""
        name, most = type(model).__name__, 0
        for path, module in model.named_modules():
            for own, shape, can_be in _weights(model, path, module, packs):
                if (kind := self._kind(own)) and not can_be:
                    raise UnsupportedError(
                        f"{own} of {name} is computed in a way that can not be split; use "
                        "--num-shard 1"
                    )
                if kind in _SUMMED:
                    most = math.gcd(most, shape[1])
                elif kind in _LOCAL:
                    heads = _heads(model, path, shape[0])
                    most = math.gcd(most, shape[0] // (2 if kind == "packed_colwise" else 1), heads)
        if most % self.world.size:
            counts = ", ".join(str(count) for count in range(1, most + 1) if most % count == 0)
            raise UnsupportedError(
                f"{name} can not be split among {self.world.size} shards; numbers that work: "
                f"{counts}"
            )

    def _kind(self, name: str) -> str:
        """Empty: all ranks have all."""
        found = self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        return "" if found in _WHOLE else found

    def outputs(self, name: str, weight: Tensor) -> Tensor:
        """Its outputs of a weight or bias; those that are gathered end with zeros, so that all
        ranks have the same number."""
        kind, size = self._kind(name), self.world.size
        if kind in _GATHERED:
            weight = F.pad(weight, (0, 0) * (weight.ndim - 1) + (0, -len(weight) % size))
        elif kind not in _LOCAL:
            return weight
        sections = 2 if kind == "packed_colwise" else 1
        parts = weight.reshape(sections, size, -1, *weight.shape[1:])
        return parts[:, self.world.rank].flatten(0, 1)

    def inputs(self, name: str, num_inputs: int) -> slice:
        """Its inputs."""
        if self._kind(name) not in _SUMMED:
            return ALL
        count = num_inputs // self.world.size
        return slice(self.world.rank * count, (self.world.rank + 1) * count)

    def taken(self, name: str, num_inputs: int) -> slice:
        """Of the inputs that come to its module."""
        return self.inputs(name, num_inputs) if self._kind(name) in _CUT else ALL

    def bias(self, name: str, bias: Tensor) -> Tensor:
        """What is added to joined results."""
        return self.outputs(name, bias) if self._kind(name) in _LOCAL else bias

    def join(self, name: str, num_outputs: int) -> Callable[[Tensor], Tensor]:
        """What makes the results of the module of those of the ranks."""
        kind, world = self._kind(name), self.world
        if kind in _SUMMED:
            return world.all_reduce
        if kind in _GATHERED:
            return lambda part: world.all_gather(part)[..., :num_outputs]
        return lambda part: part

    def count(self, name: str, number: int) -> int:
        """About how many of the numbers of a weight it has."""
        return number // self.world.size if self._kind(name) else number


def _weights(
    model: Any, path: str, module: Any, packs: Callable[[Any, str], bool]
) -> Iterator[tuple[str, Sequence[int], bool]]:
    """Names and shapes [outputs, inputs] of a module's weights, and whether they can be split."""
    if not are_experts(module) or not packs(model, f"{path}.{expert_names(module)[0]}"):
        is_linear = type(module) is nn.Linear and packs(model, f"{path}.weight")
        yield path, module.weight.shape if is_linear else (0, 0), is_linear
        return
    for name in expert_names(module):
        shape = getattr(module, name).shape[1:]
        can_be = module.is_concatenated and not module.has_bias
        yield f"{path}.{name}", shape[::-1] if module.is_transposed else shape, can_be


def _heads(model: Any, path: str, num_outputs: int) -> int:
    """How many heads a projection of an attention has; else 0."""
    parent = model.get_submodule(path.rpartition(".")[0])
    if not hasattr(parent, "layer_idx"):
        return 0
    size = getattr(parent, "head_dim", 1)
    return math.gcd(model.config.num_attention_heads, num_outputs // size)
