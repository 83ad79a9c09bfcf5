"""A device with our Triton kernels: attention, norms, gates, and quantized products."""

import logging
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

import torch
import triton
from torch import Tensor

from text_generation_shard.device import base
from text_generation_shard.device.cuda import flash, sampler
from text_generation_shard.device.cuda.attention import TritonAttention
from text_generation_shard.device.cuda.graphs import Graphs
from text_generation_shard.device.cuda.kernels import launch, pointwise
from text_generation_shard.device.cuda.matrices import (
    FORMS,
    Float8Matrix,
    Int4Matrix,
    Int8Matrix,
    OneTileMatrix,
)
from text_generation_shard.device.cuda.rows import DeviceRows, HeadShape
from text_generation_shard.device.cuda.runner import Stream, StreamRunner, SynchronousStream
from text_generation_shard.device.forward import Attention, Scoring
from text_generation_shard.device.reference.device import (
    QuantizedForm,
    TorchDevice,
)
from text_generation_shard.device.reference.linear import FloatMatrix, GatedMatrix
from text_generation_shard.device.reference.runner import EagerForward
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

# Features per program of `gate`.
_GATE_TILE = 1024


class TritonDevice(TorchDevice):
    """See `Device`. Float and fp8 products are torch's; int8 and int4 products, and with
    --deterministic all products, are one Triton kernel. Norm, rotation and gate are one kernel
    each. With TRITON_INTERPRET=1 it also runs on CPU tensors."""

    capability = 0
    """See `tiles`."""
    num_spare_blocks = 1
    cache_dtypes = MappingProxyType(
        {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    )
    stream: Stream = SynchronousStream()

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: base.DeviceOptions
    ) -> None:
        # fp8 products are torch's, whose sums may depend on the number of rows.
        self.is_deterministic = options.deterministic and options.quantize != "fp8"
        super().__init__(torch_device, dtype, options)
        self._cuda_graphs = options.cuda_graphs

    def _forms_of(self, quantize: str | None) -> Sequence[QuantizedForm]:
        return FORMS[quantize]

    def matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        columns: slice = base.ALL,
        part: int | None = None,
    ) -> base.Matrix:
        """See Device."""
        rows = weight[:, columns]
        kind = self.quantized_form((rows.shape[0], rows.shape[1]), quantize).kind
        if kind is None:
            make = OneTileMatrix if self.is_deterministic else FloatMatrix
            return make(rows.to(self.dtype).contiguous())
        given = self.dtype, self.is_deterministic
        if kind == "int4":
            return Int4Matrix(rows.contiguous(), *given)
        by_row = Int8Matrix if kind == "int8" else Float8Matrix
        return by_row(weight, *given, columns)

    def gated_matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        activation: base.Activation,
        has_bias: bool,
    ) -> base.Matrix:
        """See Device."""
        return GatedMatrix(self.matrix(weight, quantize), activation, gate)

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
    ) -> Tensor:
        """See Device."""
        out, size = torch.empty_like(hidden), hidden.shape[1]
        launch(
            pointwise.add_norm,
            (len(hidden),),
            *(hidden, delta, weight, out, multiplier),
            SIZE=size,
            SIZE_PAD=triton.next_power_of_2(size),
            EPS=eps,
            num_warps=_num_warps(size),
        )
        return out

    def attention(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        scorings: Sequence[Scoring | None] = (),
    ) -> Attention:
        """See Device."""
        if any(scorings):
            if self.cache_dtype is not self.dtype:
                raise ModelError(
                    "--kv-cache-dtype is not supported with capped scores or sinks; leave it out"
                )
            return super().attention(num_heads, num_kv_heads, head_dim, scale, scorings)
        shape = HeadShape(num_heads, num_kv_heads, head_dim, scale)
        takes_flash = flash.suits(shape, self.dtype, self.capability)
        found = TritonAttention(
            shape,
            self.torch_device,
            self.capability,
            takes_flash=takes_flash,
            upload=self.upload,
            is_deterministic=self.is_deterministic,
        )
        logger.info("attention: %s", found.name)
        return found

    def runner(self, model: base.Model) -> StreamRunner:
        """See Device."""
        graphs = Graphs(model, self._cuda_graphs, self.stream.recorder, self.upload)
        return StreamRunner(
            model,
            EagerForward(model),
            graphs,
            self.stream,
            partial(sampler.begin, self.upload),
            partial(DeviceRows, device=self.torch_device, upload=self.upload),
            self.upload,
        )


def _num_warps(size: int) -> int:
    """Never more threads than features: two threads with the same feature would race, because one
    may load it after the other has stored the sum."""
    return 8 if size >= 4096 else 4 if size >= 128 else 1


def gate(activation: base.Activation, both: Tensor) -> Tensor:
    """See `reference.linear.gate`: one kernel."""
    size = both.shape[1] // 2
    out = both.new_empty(len(both), size)
    tile = min(_GATE_TILE, triton.next_power_of_2(size))
    launch(
        pointwise.gate,
        (len(both), -(-size // tile)),
        both,
        out,
        SIZE=size,
        TILE=tile,
        ACTIVATION=activation.value,
    )
    return out
