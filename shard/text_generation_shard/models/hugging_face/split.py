"""This rank's part of each weight, by the plan that transformers has for a class of models."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.errors import UnsupportedError
from text_generation_shard.models.hugging_face.products import Finish, plus
from text_generation_shard.parallel import World

# Kinds of a plan. A rank has some outputs, which stay there or are gathered; or some inputs, whose
# results are summed; or all. The sum of experts follows from the kind of their weights.
_LOCAL = ("colwise", "packed_colwise")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SUMMED = ("rowwise", "rowwise_split_input", "rowwise_rep")
_WHOLE = ("embedding_rowwise", "mla_kv_a_proj", "moe_tp_experts", "replicated_with_grad_allreduce")

# The self-check finds it in float32: features are split whose mean is taken.
_WRONG = ("Gemma3nForCausalLM",)


def plan_of(text: Any, model_class: Any) -> dict[str, str]:
    """The kinds of modules and parameters, by name with * for numbers."""
    base, own = getattr(text, "base_model_tp_plan", None), getattr(model_class, "_tp_plan", None)
    prefix = model_class.base_model_prefix
    return {f"{prefix}.{name}": kind for name, kind in (base or {}).items()} | (own or {})


def check_plan(plan: Mapping[str, str], name: str) -> None:
    """UnsupportedError: a model of this class can not be split among ranks."""
    kinds = {*plan.values()}
    if others := ", ".join(sorted(kinds - {*_LOCAL, *_GATHERED, *_SUMMED, *_WHOLE})):
        fault = f"has parts of the kind {others}"
    elif not kinds & {*_LOCAL, *_SUMMED}:
        fault = "has no layers"
    elif name in _WRONG:
        fault = "changes its scores"
    else:
        return
    raise UnsupportedError(
        f"{name} can not be split among shards, as transformers' plan for it {fault}; use "
        "--num-shard 1"
    )


class Split:
    """What this rank has of weights [outputs, inputs], by the name of their module, or of the
    parameter of experts. One rank has all."""

    def __init__(self, plan: Mapping[str, str], world: World) -> None:
        self.world, self._plan = world, plan if world.size > 1 else {}
        self.gathers_all = False
        """Whether modules see the outputs of all ranks, as one rank does: for the self-check."""

    def _kind(self, name: str) -> str:
        """Empty: it has all."""
        found = self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        return "" if found in _WHOLE else found

    def check(self, model: Any, packs: Callable[[Any, str], bool]) -> None:
        """UnsupportedError: the model can not be split among so many ranks. packs: whether the
        parameter of this name becomes a matrix of the device."""
        most, title = 0, f"{type(model).__name__} can not be split among {self.world.size} shards"
        for name, weight in model.named_parameters():
            path = name.removesuffix(".weight")
            kind, parent = self._kind(path), model.get_submodule(path.rpartition(".")[0])
            is_plain = not getattr(parent, "has_bias", False) and packs(model, name)
            is_joined = kind == "packed_colwise" and not getattr(parent, "is_concatenated", False)
            if kind and (is_joined or not is_plain):
                raise UnsupportedError(f"{title}: {path} is computed in another way; use 1")
            turn = -1 if getattr(parent, "is_transposed", False) else 1
            num_outputs, num_inputs = (1, *weight.shape)[-2:][::turn]
            if kind in _SUMMED:
                most = math.gcd(most, num_inputs)
            elif kind in _LOCAL:
                most = math.gcd(most, num_outputs // (2 if kind == "packed_colwise" else 1))
                if hasattr(parent, "layer_idx"):
                    # Heads are not cut.
                    heads = num_outputs // getattr(parent, "head_dim", 1)
                    most = math.gcd(most, heads, model.config.num_attention_heads)
        if most % self.world.size:
            counts = [str(count) for count in range(1, most + 1) if most % count == 0]
            raise UnsupportedError(f"{title}; numbers that work: {', '.join(counts)}")

    def outputs(self, name: str, weight: Tensor) -> Tensor:
        """Its outputs of a weight or bias. Those that are gathered repeat the last one, so that all
        ranks have the same number."""
        kind, size, count = self._kind(name), self.world.size, len(weight)
        if kind not in (*_LOCAL, *_GATHERED):
            return weight
        rows = torch.arange(-(-count // size) * size, device=weight.device).clamp(max=count - 1)
        sections = 2 if kind == "packed_colwise" else 1
        return weight[rows.view(sections, size, -1)[:, self.world.rank].flatten()]

    def inputs(self, name: str, count: int) -> slice:
        """Its inputs."""
        rank, size = (self.world.rank, self.world.size) if self._kind(name) in _SUMMED else (0, 1)
        return slice(rank * count // size, (rank + 1) * count // size)

    def finish(self, name: str, num_outputs: int) -> Finish:
        """Makes what a module gives of this rank's results and bias."""
        kind, world = self._kind(name), self.world
        if kind in _SUMMED:
            return lambda part, bias: plus(world.all_reduce(part), bias)

        def gathered(part: Tensor, bias: Tensor | None) -> Tensor:
            part = plus(part, bias)
            if kind in _LOCAL and not self.gathers_all:
                return part
            return world.all_gather(part)[..., :num_outputs]

        return gathered if kind else plus
