"""What takes the place of a transformers module: the same results by the device's operators, with
this rank's part of each weight, by the plan that transformers has for a class of models."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_shard.device.base import Activation, Matrix
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import UnsupportedError
from text_generation_shard.parallel import World

# Modules of one parent that multiply the same input, in most architectures.
GATED = ("gate_proj", "up_proj")
SIBLINGS = (("q_proj", "k_proj", "v_proj"), GATED, ("w1", "w3"))
# What most gated feed-forwards compute, and the activations of which the device has a kernel.
_GATED = "self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))"
_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "GELUActivation": Activation.GELU,
    "ReLU": Activation.RELU,
}
# Largest difference of a norm, as a share of its largest result, in steps of its dtype.
_NORM_STEPS = 8


Finish = Callable[[Tensor, Tensor | None], Tensor]
"""Makes the outputs of a module of this rank's results [T, N] and bias."""


def plus(part: Tensor, bias: Tensor | None) -> Tensor:
    """What one rank has is all."""
    return part if bias is None else part + bias


class Stacked:
    """The stacked weights of modules that multiply the same input: the first one multiplies for
    all. Keeps an input and its results until the last one has called."""

    def __init__(self, matrix: Matrix, num_callers: int, num_inputs: int, own: slice) -> None:
        """own: this rank's inputs, which come alone, or with all `num_inputs`."""
        self.matrix, self._num_callers = matrix, num_callers
        self._num_inputs, self._own, self._num_own = num_inputs, own, own.stop - own.start
        self._input: Tensor | None = None
        self._out, self._num_left = torch.empty(0), 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """[…, K] → [T, the outputs of all]."""
        if hidden is not self._input:
            rows = hidden.reshape(-1, hidden.shape[-1])
            if rows.shape[1] != self._num_own:
                if rows.shape[1] != self._num_inputs:
                    raise ValueError(f"{rows.shape[1]} inputs for {self._num_inputs}")
                rows = rows[:, self._own]
            self._input, self._out = hidden, self.matrix(rows.contiguous())
            self._num_left = self._num_callers
        out = self._out
        self._num_left -= 1
        if not self._num_left:
            self._input, self._out = None, torch.empty(0)
        return out


class Product(nn.Module):
    """A Linear, by the device's product."""

    def __init__(
        self,
        stacked: Stacked,
        own: slice,
        weight: Tensor,
        bias: nn.Parameter | None,
        finish: Finish,
    ) -> None:
        """own: its outputs in the stack, those of its weight [N, K]."""
        super().__init__()
        self._stacked, self.bias, self.weight = stacked, bias, packed(weight)
        self.out_features, self.in_features = weight.shape
        self._own, self.finish = own, finish

    @property
    def matrix(self) -> Matrix:
        """All outputs of the stack."""
        return self._stacked.matrix

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, K] → […, N]."""
        out = self.finish(self._stacked(hidden)[:, self._own], self.bias)
        return out.view(*hidden.shape[:-1], out.shape[1])

    # Without hooks.
    __call__ = forward


class Packed(nn.Module):
    """A Linear whose weight is in a product of its parent."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = packed(weight)


def run_gated(module: Any, matrix: Matrix, hidden: Tensor) -> Tensor:
    """The forward of a gated feed-forward: gates and what they multiply are one product. hidden
    […, size] → the same."""
    inner = matrix(hidden.reshape(-1, hidden.shape[-1]).contiguous())
    found: Tensor = module.down_proj(inner.view(*hidden.shape[:-1], -1))
    return found


def gate_of(module: Any, source: str) -> Activation | None:
    """The activation of a gated feed-forward, whose class has this source; None: it is another
    module, or may be."""
    code, ways = "".join(source.split()), (f"return{_GATED}", f"down_proj={_GATED}returndown_proj")
    is_one = any(way in code for way in ways)
    return _ACTIVATIONS.get(type(module.act_fn).__name__) if is_one else None


class Norm(nn.Module):
    """hidden / rms(hidden) * weight, by the device's operator."""

    def __init__(self, device: Device, weight: nn.Parameter, factors: Tensor, eps: float) -> None:
        """factors: [size] in float32, from the weight, whose dtype some code reads."""
        super().__init__()
        self._device, self._eps, self._factors, self.weight = device, eps, factors, weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, size] → the same."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return self._device.add_norm(rows, None, 1.0, self._factors, self._eps).view(hidden.shape)

    # Without hooks.
    __call__ = forward


def norm_like(module: nn.Module, device: Device) -> Norm | None:
    """The same norm by the device, if the module gives the same results for a random input."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "Norm" not in type(module).__name__ or not isinstance(weight, nn.Parameter):
        return None
    takes_one = len(inspect.signature(module.forward).parameters) == 1
    if weight.ndim != 1 or not takes_one or not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, len(weight), generator=generator).to(device.torch_device, device.dtype)
    try:
        expected = module(hidden)
    except (ValueError, RuntimeError, IndexError):
        return None  # it takes another shape
    # Some architectures keep what is added to 1.
    for own in (weight.float(), weight.float() + 1.0):
        found = Norm(device, weight, own.contiguous(), eps)
        if is_close(found(hidden), expected, _NORM_STEPS):
            return found
    return None


def is_close(ours: Tensor, theirs: Tensor, num_steps: int) -> bool:
    """Whether no number differs by more than so many steps of the largest one's dtype."""
    if ours.shape != theirs.shape:
        return False
    limit = num_steps * torch.finfo(ours.dtype).eps * theirs.abs().max().float()
    return bool((ours.float() - theirs.float()).abs().max() <= limit)


def packed(weight: Tensor) -> Tensor:
    """Stands for a weight that is packed, where code reads its dtype or device."""
    found = weight.new_empty(0)
    # Not to be filled with random numbers.
    found._is_hf_initialized = True  # type: ignore[attr-defined]
    return found


def are_experts(module: Any) -> bool:
    """Whether transformers calls an interface for this module's products."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")


def expert_names(module: Any) -> tuple[str, str]:
    """The names of the parameters [E, …] of experts: into their inner features, and back."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def run_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """See transformers' ExpertsInterface. hidden [T, size]; chosen and weights [T, k]. Reads chosen
    experts only. A token's sum is in the order of its choice, so that it does not depend on other
    tokens."""
    up_name, down_name = expert_names(self)
    up, down = self.own_matrices[up_name], self.own_matrices[down_name]
    up_bias = getattr(self, f"{up_name}_bias", None) if self.has_bias else None
    down_bias = getattr(self, f"{down_name}_bias", None) if self.has_bias else None
    out = hidden.new_zeros(*chosen.shape, hidden.shape[-1])
    for expert in sorted(set(chosen.flatten().tolist())):
        if expert >= len(up):
            continue  # a token without an expert
        rows, place = torch.where(chosen == expert)
        inner = up[expert](hidden[rows], None if up_bias is None else up_bias[expert])
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        found = down[expert](inner.contiguous(), None if down_bias is None else down_bias[expert])
        out[rows, place] = found * weights[rows, place, None].to(hidden.dtype)
    total = out[:, 0]
    for number in range(1, chosen.shape[1]):
        total = total + out[:, number]
    finished: Tensor = self.own_finish(total, None)
    return finished


# ---- Several ranks ----

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
