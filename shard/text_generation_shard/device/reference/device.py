"""Any torch device, with torch's operators: the specification of the other devices."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor

from text_generation_shard.arrays import Upload, plain_upload
from text_generation_shard.device import base
from text_generation_shard.device.forward import Attention, Scoring
from text_generation_shard.device.reference.attention import TorchAttention
from text_generation_shard.device.reference.linear import (
    FloatMatrix,
    FloatTable,
    GatedMatrix,
    dtype_name,
)
from text_generation_shard.device.reference.runner import EagerForward, TorchRunner
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import Collectives, Rendezvous


class PlainCopies:
    """See `WeightCopies`: copies and actions run at once, in the calling thread."""

    matrix_dtype = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See WeightCopies."""
        target.copy_(source)

    def then(self, action: Callable[[], None]) -> None:
        """See WeightCopies."""
        action()


class QuantizedForm(Protocol):
    """A form in which a device stores quantized weights."""

    kind: str

    @staticmethod
    def obstacle_of(weight: Tensor) -> str:
        """Why it can not store the weight; empty: it can."""


# The reference is used in tests only; their caches fit into this.
_REFERENCE_CACHE_BYTES = 2**28

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def refuse_determinism(device: base.Device, what: str) -> ModelError:
    """The error for --deterministic with something that does not support it."""
    return ModelError(
        f"--deterministic is not supported with {what} on {device.name}; remove one of them, or "
        "use --device cpu with --dtype float32 or bfloat16"
    )


class TorchDevice:
    """See `Device`."""

    is_deterministic = False
    sums_in_parts = False
    runs_behind = False
    spares_core = True
    num_spare_blocks = 0
    cache_dtypes: Mapping[str, torch.dtype] = {}
    """Value of --kv-cache-dtype → dtype of keys and values."""

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: base.DeviceOptions
    ) -> None:
        self.name = torch_device.type
        self.torch_device, self.dtype = torch_device, dtype
        self.upload: Upload = plain_upload(torch_device)
        """See Device."""
        self.cache_dtype = self._cache_dtype_of(options)
        """See Device."""
        self._memory_fraction = options.memory_fraction
        self._must_be_deterministic = options.deterministic
        if options.deterministic and not self.is_deterministic:
            kind = options.quantize and f"--quantize {options.quantize}"
            raise refuse_determinism(self, kind or f"--dtype {dtype_name(dtype)}")

    def _cache_dtype_of(self, options: base.DeviceOptions) -> torch.dtype:
        name = options.kv_cache_dtype
        if name is None:
            return self.dtype
        if name not in self.cache_dtypes:
            raise ModelError(
                f"--kv-cache-dtype {name} runs on CUDA only; leave it out, or use --device cuda"
            )
        return self.cache_dtypes[name]

    def check_room(self, nbytes: int, kind: str) -> None:
        """See Device: no check."""

    def weight_copies(self) -> AbstractContextManager[base.WeightCopies]:
        """See Device: in the checkpoint's dtype, so that quantization rounds only once."""
        return nullcontext(PlainCopies())

    def quantized_form(self, shape: tuple[int, int], quantize: str | None) -> base.Form:
        """See Device: the first of `_forms_of` that can store it."""
        obstacle, weight = "", torch.empty(shape, device="meta")
        for form in self._forms_of(quantize):
            if not (found := form.obstacle_of(weight)):
                return base.Form(form.kind, obstacle)
            obstacle = obstacle or found
        return base.Form(None, obstacle)

    def _forms_of(self, quantize: str | None) -> Sequence[QuantizedForm]:
        """The forms of a weight, best first, for a value of --quantize; here none."""
        return ()

    def matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        columns: slice = base.ALL,
        part: int | None = None,
    ) -> base.Matrix:
        """See Device; nothing is quantized."""
        return FloatMatrix(weight[:, columns].to(self.dtype).contiguous())

    def gated_matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        activation: base.Activation,
        has_bias: bool,
    ) -> base.Matrix:
        """See Device."""
        return GatedMatrix(self.matrix(weight, quantize), activation)

    def embedding(self, weight: Tensor, quantize: str | None) -> base.EmbeddingTable:
        """See Device. int8 at least: with a tied head, the error of int4 is in the scores."""
        quantize = None if quantize is None else "int8"
        if self.quantized_form((weight.shape[0], weight.shape[1]), quantize).kind == "int8":
            # A matrix of int8 is a table too.
            return cast(base.EmbeddingTable, self.matrix(weight, quantize))
        return FloatTable(weight.to(self.dtype), lambda table: self.matrix(table, None))

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
    ) -> Tensor:
        """See Device. Makes one float32 copy; everything else is in place."""
        if delta is not None:
            hidden.add_(delta, alpha=multiplier)
        wide = hidden.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().mul_(1.0 / hidden.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(inverse).mul_(weight).to(hidden.dtype)

    def attention(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        scorings: Sequence[Scoring | None] = (),
    ) -> Attention:
        """See Device."""
        return self._torch_attention(scale, scorings, "heads with capped scores or sinks")

    def _torch_attention(
        self, scale: float, scorings: Sequence[Scoring | None], what: str
    ) -> TorchAttention:
        """Attention by torch. `what`: named by the error, if it must be deterministic."""
        if self._must_be_deterministic:
            raise refuse_determinism(self, what)
        self.is_deterministic = False
        return TorchAttention(scale, self._make_zeros, scorings)

    def _make_zeros(self, count: int, num_blocks: int, block_bytes: int) -> Tensor:
        return torch.zeros(
            count * num_blocks * block_bytes, dtype=torch.uint8, device=self.torch_device
        )

    def runner(self, model: base.Model) -> base.Runner:
        """See Device."""
        return TorchRunner(EagerForward(model), self.upload, model.length_rule)

    def free_bytes(self, step_bytes: int, profile_memory: Callable[[], None]) -> base.MemoryBudget:
        """See Device: a fixed size."""
        return base.MemoryBudget(_REFERENCE_CACHE_BYTES, step_bytes)

    def collectives(self, rendezvous: Rendezvous, slot_bytes: int) -> Collectives:
        """See Device: these operators serve one rank."""
        raise ModelError(f"{self.name} computes with one shard; use --num-shard 1")

    def release_memory(self) -> None:
        """See Device: nothing is cached."""

    def serve(self) -> None:
        """See Device: nothing."""
