"""Loads a checkpoint into a model of transformers, matrix by matrix, into the form that the device
multiplies.

transformers reads, renames and joins the tensors of a checkpoint, and passes each whole parameter
to a quantizer: ours packs it at once. So the process never holds more than the packed weights and
one parameter.
"""

import inspect
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from text_generation_shard.checkpoint.weights import weight_files
from text_generation_shard.device.base import Device, Matrix
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.hugging_face.config import TransformersConfig

logger = logging.getLogger(__name__)

_NAME = "pytgi"
# torch takes numbers in two vectors of the processor, up to 32 numbers, and the last ones by other
# code. Measured: SiLU, sigmoid, GELU and softplus give 4 to 10 % of those other bits.
_VECTOR = 32
# Seconds between two lines about progress.
_PROGRESS_S = 2.0


class Loaded(NamedTuple):
    """A loaded model."""

    model: Any
    nbytes: int
    # A row's bits do not depend on the other rows: the device multiplies with every matrix, and
    # what torch computes of the results is the same wherever a row is.
    is_deterministic: bool


def load(
    directory: Path,
    config: TransformersConfig,
    device: Device,
    quantize: str | None,
    attention_name: str,
) -> Loaded:
    """ModelError: the weights are missing, do not fit, or are not those of the configuration."""
    weight_files(directory)
    log: Any = transformers.utils.logging
    log.disable_progress_bar()
    log.set_verbosity_error()
    packing = Packing(device, quantize)
    try:
        model, info = config.model_class.from_pretrained(
            directory,
            config=config.text,
            dtype=device.dtype,
            attn_implementation=attention_name,
            quantization_config=_Settings(packing),
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=config.trusts_code,
        )
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        if attention_name in str(error):
            raise UnsupportedError(
                f"{config.architecture} computes its attention in its own way, which is not "
                "supported"
            ) from error
        sentence = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"transformers {transformers.__version__} does not load {directory} as "
            f"{config.architecture}: {sentence}"
        ) from error
    _check_names(directory, info)
    model.eval().requires_grad_(False).to(device.torch_device)
    packing.pack_tied_head(model)
    kept = {part.data_ptr(): part for part in [*model.parameters(), *model.buffers()]}
    packing.nbytes += sum(part.nbytes for part in kept.values())
    packing.log()
    head = _head_of(model)
    others = [module for module in model.modules() if module is not head]
    return Loaded(model, packing.nbytes, not any(_multiplies(m) or _has_tail(m) for m in others))


def _has_tail(module: nn.Module) -> bool:
    """Whether the rows of a product are no whole vectors."""
    return isinstance(module, Product) and module.out_features % _VECTOR != 0


def _multiplies(module: nn.Module) -> bool:
    """Whether torch multiplies with a weight of this module, which is no matrix of the device."""
    if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
        return False
    return any(part.ndim > 1 for part in module.parameters(recurse=False))


def _check_names(directory: Path, info: dict[str, Any]) -> None:
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"the weights in {directory} lack {', '.join(missing[:3])}{more}; config.json and "
            "weights are not of the same model"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        logger.info("%d tensors are not used, %s among them", len(unexpected), unexpected[0])


class Packing:
    """Replaces matrices of a model by the device's. Owns their statistics."""

    def __init__(self, device: Device, quantize: str | None) -> None:
        self._device, self._quantize = device, quantize
        self.nbytes = 0
        self._packs_experts = True
        self._kinds: Counter[str] = Counter()
        # By class, since it takes long to find.
        self._sources: dict[type, str] = {}
        self._total, self._spoke = 0, time.monotonic()

    def prepare(self, model: Any) -> None:
        """Before the weights of the model are read."""
        bits = {"int8": 8, "int4": 4, "fp8": 8}.get(
            self._quantize or "", self._device.dtype.itemsize * 8
        )
        wanted = [part for name, part in model.named_parameters() if self.packs(model, name)]
        self._total = len(wanted)
        kind = self._quantize or str(self._device.dtype).removeprefix("torch.")
        self._device.check_room(sum(part.numel() for part in wanted) * bits // 8, kind)
        # An expert with a norm of its own is computed by transformers.
        experts = [module for module in model.modules() if _are_experts(module)]
        self._packs_experts = not any(module.has_post_expert_norm for module in experts)
        if experts and self._packs_experts:
            ALL_EXPERTS_FUNCTIONS.register(_NAME, run_experts)
            for module in experts:
                module.config._experts_implementation = _NAME
                module.own_matrices = {}

    def packs(self, model: Any, name: str) -> bool:
        """Whether the parameter of this name becomes a matrix of the device."""
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if _are_experts(module):
            return self._packs_experts and last in _expert_names(module)
        if last != "weight" or type(module) not in (nn.Linear, Conv1D):
            return False
        # Some code multiplies with the weight of its Linear by itself.
        parent, _, own = path.rpartition(".")
        return f".{own}.weight" not in self._source(type(model.get_submodule(parent)))

    def _source(self, code: type) -> str:
        if code not in self._sources:
            is_known = code.__module__.startswith("transformers")
            self._sources[code] = inspect.getsource(code) if is_known else ""
        return self._sources[code]

    def pack(self, model: Any, name: str, weight: Tensor) -> None:
        """Replace a parameter by the device's matrix, or matrices of experts [E, …]."""
        weight = weight.to(self._device.torch_device)
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if _are_experts(module):
            each = weight.transpose(1, 2) if module.is_transposed else weight
            module.own_matrices[last] = [self._matrix(one, self._quantize) for one in each]
            setattr(module, last, nn.Parameter(_packed(weight), requires_grad=False))
        else:
            is_head = module is _head_of(model)
            weight = weight if isinstance(module, nn.Linear) else weight.T
            self._replace(model, path, weight, "int8" if self._quantize and is_head else None)
        if time.monotonic() - self._spoke > _PROGRESS_S:
            self._spoke = time.monotonic()
            done = sum(self._kinds.values())
            logger.info("loading weights: %d matrices, %d parameters in all", done, self._total)

    def pack_tied_head(self, model: Any) -> None:
        """The head that shares its weight with the embeddings is not in the checkpoint."""
        head = _head_of(model)
        if isinstance(head, nn.Linear):
            path = next(name for name, module in model.named_modules() if module is head)
            self._replace(model, path, head.weight.data, "int8" if self._quantize else None)

    def _replace(self, model: Any, path: str, weight: Tensor, head_form: str | None) -> None:
        parent, _, own = path.rpartition(".")
        module = model.get_submodule(path)
        matrix = self._matrix(weight, head_form or self._quantize)
        setattr(model.get_submodule(parent), own, Product(matrix, weight, module.bias))

    def _matrix(self, weight: Tensor, quantize: str | None) -> Matrix:
        found = self._device.matrix(weight.contiguous(), quantize)
        self.nbytes += found.nbytes
        self._kinds[found.kind] += 1
        return found

    def log(self) -> None:
        """Say what was loaded."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        logger.info("weights: %.1f MB, matrices: %s", self.nbytes / 1e6, counts)


def _head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def _are_experts(module: Any) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")


def _expert_names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


class Product(nn.Module):
    """A Linear, by the device's product."""

    def __init__(self, matrix: Matrix, weight: Tensor, bias: nn.Parameter | None) -> None:
        """weight: [N, K], which is in the matrix."""
        super().__init__()
        self._matrix, self.bias, self.weight = matrix, bias, _packed(weight)
        self.out_features, self.in_features = weight.shape

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, K] → […, N]."""
        rows = hidden.reshape(-1, self.in_features).contiguous()
        return self._matrix(rows, self.bias).view(*hidden.shape[:-1], self.out_features)


def _packed(weight: Tensor) -> Tensor:
    """Stands for a weight that is packed, where code reads its dtype or device."""
    found = weight.new_empty(0)
    # Not to be filled with random numbers.
    found._is_hf_initialized = True  # type: ignore[attr-defined]
    return found


def run_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """See transformers' ExpertsInterface. hidden [T, size]; chosen and weights [T, k]. Reads chosen
    experts only. A token's sum is in the order of its choice, so that it does not depend on other
    tokens."""
    up_name, down_name = _expert_names(self)
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
    return total


@register_quantization_config(_NAME)
class _Settings(QuantizationConfigMixin):
    """Hands a Packing to the quantizer."""

    def __init__(self, packing: Packing) -> None:
        self.quant_method: Any = _NAME
        self.packing = packing

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Settings":
        return self


@register_quantizer(_NAME)
class _Quantizer(HfQuantizer):
    """See HfQuantizer."""

    quantization_config: "_Settings"

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.quantization_config.packing.prepare(model)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        found: bool = self.quantization_config.packing.packs(model, param_name)
        return found

    def get_quantize_ops(self) -> "_Pack":
        return _Pack(self.quantization_config.packing)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Pack(ConversionOps):
    """See ConversionOps: the end of a parameter's way."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **given: Any,
    ) -> dict[str, list[Tensor]]:
        """Nothing is left to be set."""
        for name, found in input_dict.items():
            weight = found[0] if isinstance(found, list) else found
            self._packing.pack(given["model"], name, weight)
            given["missing_keys"].discard(name)
        return {}
