"""The interface of a device, and its specification: torch's operators on any torch device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from text_generation_shard.arrays import Upload, plain_upload
from text_generation_shard.device import base
from text_generation_shard.device.base import Attention, Scoring
from text_generation_shard.device.reference.attention import TorchAttention
from text_generation_shard.device.reference.matrices import (
    FloatMatrix,
    FloatTable,
    GatedMatrix,
    dtype_name,
    gate,
)
from text_generation_shard.device.reference.runner import EagerForward, TorchRunner
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import Collectives, Rendezvous

# The reference is used in tests only; their caches fit into this.
_REFERENCE_CACHE_BYTES = 2**28

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def refuse_determinism(name: str, what: str) -> ModelError:
    """The error for --deterministic with something that does not support it."""
    return ModelError(
        f"--deterministic is not supported with {what} on {name}; remove one of them, or "
        "use --device cpu with --dtype float32 or bfloat16"
    )


class Device:
    """Hardware that computes one model. This class computes with torch's operators; others override
    what they do in another way."""

    # A row's results are bit for bit independent of the other rows.
    is_deterministic = False
    # Sums over inputs that are split over ranks are computed in fixed parts, which a binary tree
    # adds. The result has the same bits for every number of ranks, as long as each has whole parts.
    sums_in_parts = False
    # Whether a step may be launched before the previous one has a result.
    runs_behind = False
    # Whether a core is free for other processes while a step is computed.
    spares_core = True
    # Cache blocks beyond those of requests; the padding of a pass is written there.
    num_spare_blocks = 0
    # Value of --kv-cache-dtype → dtype of keys and values.
    cache_dtypes: Mapping[str, torch.dtype] = {}
    _gate = staticmethod(gate)

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: base.DeviceOptions
    ) -> None:
        """dtype: of activations."""
        # As in /info (cpu, cuda, …).
        self.name = torch_device.type
        self.torch_device, self.dtype = torch_device, dtype
        # Copies host arrays to device tensors. Later device operations see the values. The arrays
        # must not change afterwards.
        self.upload: Upload = plain_upload(torch_device)
        # Dtype of cached keys and values.
        self.cache_dtype = self._cache_dtype_of(options)
        self._memory_fraction = options.memory_fraction
        self._must_be_deterministic = options.deterministic
        if options.deterministic and not self.is_deterministic:
            kind = options.quantize and f"--quantize {options.quantize}"
            raise refuse_determinism(self.name, kind or f"--dtype {dtype_name(dtype)}")

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
        """Raise ModelError if weights of `nbytes`, stored as `kind`, do not fit."""

    def weight_copies(self) -> AbstractContextManager[base.WeightCopies]:
        """The context in which weights are loaded. Leaving it without an error completes all copies
        and actions. It releases all its threads and memory. Here matrices keep the checkpoint's
        dtype, so that quantization rounds only once."""
        return nullcontext(base.WeightCopies())

    def quantized_form(self, shape: tuple[int, int], quantize: str | None) -> base.Form:
        """How `matrix` stores a weight [N, K] of this shape: in the first of `_forms_of` that
        can."""
        form, obstacle = self._form_of(shape, quantize)
        return base.Form(form and form.kind, obstacle)

    def _form_of(self, shape: tuple[int, int], quantize: str | None) -> tuple[Any, str]:
        """The class of a quantized weight, None for a float one; and see `Form.obstacle`."""
        obstacle, weight = "", torch.empty(shape, device="meta")
        for form in self._forms_of(quantize):
            if not (found := form.obstacle_of(weight)):
                return form, obstacle
            obstacle = obstacle or found
        return None, obstacle

    def _forms_of(self, quantize: str | None) -> Sequence[Any]:
        """The quantized forms of a weight, best first, for a value of --quantize; here none. Each
        is a class with its `kind`, and `obstacle_of(weight)`: why it can not store a weight (empty:
        it can)."""
        return ()

    def matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        columns: slice = base.ALL,
        part: int | None = None,
    ) -> base.Matrix:
        """A weight [N, K] of any dtype in the device's best form; quantize: int8, int4, fp8 or
        None. Only `columns` are kept, with the quantized values of the whole weight. part: number
        of inputs of a fixed part, used if `sums_in_parts`."""
        rows = weight[:, columns]
        form, _ = self._form_of((rows.shape[0], rows.shape[1]), quantize)
        if form is None:
            return self._float_matrix(rows.to(self.dtype).contiguous(), part)
        return self._quantized_matrix(form, weight, columns, part)

    def _float_matrix(self, weight: Tensor, part: int | None) -> base.Matrix:
        """A weight of the dtype of activations."""
        return FloatMatrix(weight)

    def _quantized_matrix(
        self, form: Any, weight: Tensor, columns: slice, part: int | None
    ) -> base.Matrix:
        """A weight in one of `_forms_of`."""
        raise NotImplementedError

    def gated_matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        activation: base.Activation,
        has_bias: bool,
    ) -> base.Matrix:
        """`matrix` for a gated weight: outputs are gates, followed by the values they multiply."""
        return GatedMatrix(self.matrix(weight, quantize), activation, self._gate)

    def embedding(self, weight: Tensor, quantize: str | None) -> base.EmbeddingTable:
        """The token embedding table; int8 at least: with a tied head, the error of int4 is in the
        scores."""
        quantize = None if quantize is None else "int8"
        if self.quantized_form((weight.shape[0], weight.shape[1]), quantize).kind == "int8":
            # A matrix of int8 is a table too.
            return cast(base.EmbeddingTable, self.matrix(weight, quantize))
        return FloatTable(weight.to(self.dtype), lambda table: self.matrix(table, None))

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
    ) -> Tensor:
        """hidden [T, size] += delta * multiplier, in place. Returns hidden / rms(hidden) * weight;
        weight [size] is float32; all are contiguous."""
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
        """The best attention for this head shape; queries are multiplied by `scale`. scorings: of
        each layer; empty: none has any. Raises ModelError if the device must be deterministic and
        this attention is not."""
        return self._torch_attention(scale, scorings, "heads with capped scores or sinks")

    def _torch_attention(
        self, scale: float, scorings: Sequence[Scoring | None], what: str
    ) -> TorchAttention:
        """Attention by torch. `what`: named by the error, if it must be deterministic."""
        if self._must_be_deterministic:
            raise refuse_determinism(self.name, what)
        self.is_deterministic = False
        return TorchAttention(scale, self._make_zeros, scorings)

    def _make_zeros(self, count: int, num_blocks: int, block_bytes: int) -> Tensor:
        return torch.zeros(
            count * num_blocks * block_bytes, dtype=torch.uint8, device=self.torch_device
        )

    def runner(self, model: base.Model) -> base.Runner:
        """The runner for the steps of a loaded model."""
        return TorchRunner(EagerForward(model), self.upload, model.length_rule)

    def free_bytes(self, step_bytes: int, profile_memory: Callable[[], None]) -> base.MemoryBudget:
        """Memory for the KV cache. `profile_memory` runs the steps that take most memory;
        `step_bytes` is an estimate of that memory. A device uses one of the two; here the cache has
        a fixed size."""
        return base.MemoryBudget(_REFERENCE_CACHE_BYTES, step_bytes)

    def collectives(self, rendezvous: Rendezvous, slot_bytes: int) -> Collectives:
        """Collective operations with the other ranks. All ranks call this at the same time; it
        returns after a successful trial operation. slot_bytes: most bytes that a rank sends at
        once; larger tensors are split. Raises ModelError if they are not available, as here;
        RankError as Rendezvous does."""
        raise ModelError(f"{self.name} computes with one shard; use --num-shard 1")

    def release_memory(self) -> None:
        """Release memory that is cached for later steps; called after a step ran out of memory."""

    def serve(self) -> None:
        """Start background work; called when the server begins to answer requests."""
