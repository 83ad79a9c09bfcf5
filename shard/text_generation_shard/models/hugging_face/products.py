"""What takes the place of a transformers module: the same results by the device's operators."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_shard.device.base import Activation, Matrix
from text_generation_shard.device.reference.device import Device

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


class GatedMLP:
    """The forward of a gated feed-forward: gates and what they multiply are one product."""

    def __init__(self, matrix: Matrix, module: Any) -> None:
        self._matrix, self._module = matrix, module

    def __call__(self, hidden: Tensor) -> Tensor:
        """[…, size] → the same."""
        inner = self._matrix(hidden.reshape(-1, hidden.shape[-1]).contiguous())
        found: Tensor = self._module.down_proj(inner.view(*hidden.shape[:-1], -1))
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
        expected = module(hidden).float()
    except (ValueError, RuntimeError, IndexError):
        return None  # it takes another shape
    limit = _NORM_STEPS * torch.finfo(device.dtype).eps * expected.abs().max()
    # Some architectures keep what is added to 1.
    for own in (weight.float(), weight.float() + 1.0):
        found = Norm(device, weight, own.contiguous(), eps)
        if bool((found(hidden).float() - expected).abs().max() <= limit):
            return found
    return None


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
