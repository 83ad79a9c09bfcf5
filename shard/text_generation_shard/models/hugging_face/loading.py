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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from text_generation_shard.checkpoint.weights import check_room, mismatch, open_tensors
from text_generation_shard.device.base import Matrix
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.hugging_face.config import TransformersConfig, refused
from text_generation_shard.models.hugging_face.products import (
    GATED,
    SIBLINGS,
    Packed,
    Product,
    Split,
    Stacked,
    are_experts,
    expert_names,
    gate_of,
    norm_like,
    packed,
    run_experts,
    run_gated,
)
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)

_NAME = "pytgi"
# torch takes numbers in two vectors of the processor, up to 32 numbers, and the last ones by other
# code. Measured: SiLU, sigmoid, GELU and softplus give 4 to 10 % of those other bits.
_VECTOR = 32
# Seconds between two lines about progress.
_PROGRESS_S = 2.0


def load(
    directory: Path,
    config: TransformersConfig,
    device: Device,
    quantize: str | None,
    attention_name: str,
    world: World,
) -> tuple[Any, "Packing"]:
    """The model, and what is known of it. ModelError: the weights are missing, do not fit, can not
    be split, or are not those of the configuration."""
    open_tensors(directory)
    log: Any = transformers.utils.logging
    log.disable_progress_bar()
    log.set_verbosity_error()
    packing = Packing(device, quantize, Split(config.plan, world))
    version, name = transformers.__version__, config.architecture
    with refused(f"transformers {version} does not load {directory} as {name}"):
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
                key_mapping=config.key_mapping,
            )
        except (KeyError, ValueError) as error:
            if attention_name not in str(error):
                raise
            raise UnsupportedError(
                f"{name} computes its attention in its own way, which is not supported"
            ) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(mismatch(directory, missing, []))
    if unexpected := sorted(info["unexpected_keys"]):
        logger.info("%d tensors are not used, %s among them", len(unexpected), unexpected[0])
    model.eval().requires_grad_(False).to(device.torch_device)
    packing.finish(model)
    return model, packing


def _depends_on_rows(module: nn.Module) -> bool:
    """Whether torch multiplies with a weight of this module, which is no matrix of the device, or
    the rows of a product are no whole vectors."""
    if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
        return False
    if isinstance(module, Product) and module.out_features % _VECTOR:
        return True
    return any(part.ndim > 1 for part in module.parameters(recurse=False))


class Packing(ConversionOps):
    """Replaces matrices of a model by the device's: the end of a parameter's way, see
    ConversionOps. Owns their statistics."""

    def __init__(self, device: Device, quantize: str | None, split: Split) -> None:
        self._device, self._quantize, self.split = device, quantize, split
        self.nbytes = 0
        self.is_deterministic = False
        """A row's bits do not depend on the other rows: the device multiplies with every matrix,
        and what torch computes of the results is the same wherever a row is."""
        self._packs_experts = True
        # By parent: weights that wait for their siblings.
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._kinds: Counter[str] = Counter()
        # By class, since it takes long to find.
        self._sources: dict[type, str] = {}
        self._total, self._spoke = 0, time.monotonic()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packing":
        """transformers copies the settings that hold it."""
        return self

    def prepare(self, model: Any) -> None:
        """Before the weights of the model are read."""
        wanted = [part for name, part in model.named_parameters() if self.packs(model, name)]
        self._total = len(wanted)
        num_numbers = sum(part.numel() for part in wanted) // self.split.world.size
        check_room(self._device, self._quantize, num_numbers)
        # An expert with a norm of its own is computed by transformers.
        experts = [module for module in model.modules() if are_experts(module)]
        self._packs_experts = not any(module.has_post_expert_norm for module in experts)
        if experts and self._packs_experts:
            ALL_EXPERTS_FUNCTIONS.register(_NAME, run_experts)
            for module in experts:
                module.config._experts_implementation = _NAME
                module.own_matrices = {}
        self.split.check(model, self.is_matrix)

    def packs(self, model: Any, name: str) -> bool:
        """Whether the parameter of this name becomes a matrix of the device once it is read. A
        tied head does not: see `finish`."""
        return name not in model.all_tied_weights_keys and self.is_matrix(model, name)

    def is_matrix(self, model: Any, name: str) -> bool:
        """Whether the device multiplies with this parameter."""
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if are_experts(module):
            return self._packs_experts and last in expert_names(module)
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
            self.pack(given["model"], name, weight)
            given["missing_keys"].discard(name)
        return {}

    def pack(self, model: Any, name: str, weight: Tensor) -> None:
        """Replace a parameter by the device's matrix, or matrices of experts [E, …]."""
        weight = weight.to(self._device.torch_device)
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if are_experts(module):
            each = weight.transpose(1, 2) if module.is_transposed else weight
            module.own_matrices[last] = [
                self._matrix(name, self.split.outputs(name, one), self._quantize) for one in each
            ]
            if last == expert_names(module)[1]:
                module.own_finish = self.split.finish(name, each.shape[1])
            setattr(module, last, nn.Parameter(packed(weight), requires_grad=False))
        else:
            self._collect(model, path, weight if isinstance(module, nn.Linear) else weight.T)
        if time.monotonic() - self._spoke > _PROGRESS_S:
            self._spoke = time.monotonic()
            done = sum(self._kinds.values())
            logger.info("loading weights: %d matrices, %d parameters in all", done, self._total)

    def finish(self, model: Any) -> None:
        """After all parameters: what is not in the checkpoint, and norms."""
        # A head that shares its weight with the embeddings.
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear):
            path = next(name for name, module in model.named_modules() if module is head)
            parent, _, own = path.rpartition(".")
            self._replace(model, parent, {own: head.weight.data})
        for path, module in list(model.named_modules()):
            parent, _, own = path.rpartition(".")
            if isinstance(module, Product) and module.bias is not None:
                bias = self.split.outputs(path, module.bias.data)
                module.bias = nn.Parameter(bias, requires_grad=False)
            if (norm := norm_like(module, self._device)) is not None:
                setattr(model.get_submodule(parent), own, norm)
        kept = {part.data_ptr(): part for part in [*model.parameters(), *model.buffers()]}
        self.nbytes += sum(part.nbytes for part in kept.values())
        head = model.get_output_embeddings()
        others = [module for module in model.modules() if module is not head]
        self.is_deterministic = not any(map(_depends_on_rows, others))
        counts = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        logger.info("weights: %.1f MB, matrices: %s", self.nbytes / 1e6, counts)

    def _collect(self, model: Any, path: str, weight: Tensor) -> None:
        """Pack a weight [N, K] together with its siblings, once all have come."""
        parent, _, own = path.rpartition(".")
        siblings = self._siblings(model, parent, own)
        waiting = self._waiting.setdefault(f"{parent}.{siblings[0]}", {})
        waiting[own] = weight
        if len(waiting) == len(siblings):
            del self._waiting[f"{parent}.{siblings[0]}"]
            self._replace(model, parent, {name: waiting[name] for name in siblings})

    def _siblings(self, model: Any, parent: str, own: str) -> tuple[str, ...]:
        """The modules with which this one shares its input."""
        for names in SIBLINGS:
            found = [getattr(model.get_submodule(parent), name, None) for name in names]
            if own in names and all(type(one) is nn.Linear for one in found):
                sizes = {one.in_features for one in found if one is not None}
                paths = [f"{parent}.{name}.weight" for name in names]
                if len(sizes) == 1 and all(self.packs(model, path) for path in paths):
                    return names
        return (own,)

    def _replace(self, model: Any, parent: str, weights: dict[str, Tensor]) -> None:
        """Put products in the place of modules, whose weights are stacked."""
        place, start, split = model.get_submodule(parent), 0, self.split
        paths = {name: f"{parent}.{name}".lstrip(".") for name in weights}
        own = {name: split.outputs(paths[name], weight) for name, weight in weights.items()}
        first, weight = next(iter(weights.items()))
        is_head = getattr(place, first, None) is model.get_output_embeddings()
        kind = "int8" if self._quantize and is_head else self._quantize
        whole = torch.cat([*own.values()])
        gate = gate_of(place, self._source(type(place))) if tuple(weights) == GATED else None
        if gate is not None and split.world.size == 1 and place.gate_proj.bias is None:
            matrix = self._kept(self._device.gated_matrix(whole, kind, gate, has_bias=False))
            place.forward = partial(run_gated, place, matrix)
            for name, weight in weights.items():
                setattr(place, name, Packed(weight))
            return
        matrix = self._matrix(paths[first], whole, kind)
        inputs = split.inputs(paths[first], weight.shape[1])
        stacked = Stacked(matrix, len(weights), weight.shape[1], inputs)
        for name, weight in weights.items():
            outputs = slice(start, start := start + len(own[name]))
            bias, finish = getattr(place, name).bias, split.finish(paths[name], len(weight))
            setattr(place, name, Product(stacked, outputs, own[name], bias, finish))

    def _matrix(self, name: str, weight: Tensor, quantize: str | None) -> Matrix:
        """weight: this rank's outputs, with all inputs."""
        inputs = self.split.inputs(name, weight.shape[1])
        return self._kept(self._device.matrix(weight.contiguous(), quantize, inputs))

    def _kept(self, found: Matrix) -> Matrix:
        self.nbytes += found.nbytes
        self._kinds[found.kind] += 1
        return found


@register_quantization_config(_NAME)
class _Settings(QuantizationConfigMixin):
    """Hands a Packing to the quantizer."""

    def __init__(self, packing: Packing) -> None:
        self.quant_method: Any = _NAME
        self.packing = packing


@register_quantizer(_NAME)
class _Quantizer(HfQuantizer):
    """See HfQuantizer."""

    quantization_config: _Settings

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.quantization_config.packing.prepare(model)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return self.quantization_config.packing.packs(model, param_name)

    def get_quantize_ops(self) -> Packing:
        return self.quantization_config.packing

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
