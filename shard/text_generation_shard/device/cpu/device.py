"""The CPU device. Only this file decides whether our kernels or torch's are used."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.device import base
from text_generation_shard.device.base import Attention, Scoring
from text_generation_shard.device.cpu import host, kernels
from text_generation_shard.device.cpu.attention import PackedAttention, unwritten_zeros
from text_generation_shard.device.cpu.collectives import SharedMemoryCollectives
from text_generation_shard.device.cpu.host import num_cores
from text_generation_shard.device.cpu.kernels.compile import Wanted, prepare
from text_generation_shard.device.cpu.kernels.pointwise import add_norm
from text_generation_shard.device.cpu.matrices import (
    Int4Matrix,
    Int8Matrix,
    OneDnnMatrix,
    PackedInt4Matrix,
    PackedInt8Matrix,
    PackedWeight,
)
from text_generation_shard.device.cpu.runner import CpuRunner, fused_decoder
from text_generation_shard.device.reference.device import DTYPES, Device
from text_generation_shard.device.reference.matrices import GatedMatrix
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import Collectives, Rendezvous

logger = logging.getLogger(__name__)

# Fraction of the machine's free memory for the KV cache.
_CACHE_SHARE = 0.5


def open_device(options: base.DeviceOptions) -> Device:
    """Open the CPU. Raises ModelError if it does not support the options."""
    if options.cuda_graphs:
        logger.warning("--cuda-graphs has no effect on a CPU, where a step is a single call anyway")
    if options.quantize == "fp8":
        raise ModelError("--quantize fp8 runs on a GPU only; use int8 or int4, or --device cuda")
    name = options.dtype or ("float32" if options.quantize is None else "bfloat16")
    if name == "float16":
        logger.warning("--dtype float16 is computed in float32 on a CPU, with twice the memory")
        name = "float32"
    dtype = DTYPES[name]
    device = CpuDevice(dtype, options)
    may_choose = dtype is torch.bfloat16 and not options.deterministic and not options.quantize
    # With several ranks, each would decide by its own timing.
    may_choose = may_choose and options.world_size == 1
    if may_choose and kernels.has_bfloat16_tiles():
        ours, torchs = (_milliseconds(kind) for kind in (PackedWeight, OneDnnMatrix))
        logger.info("bfloat16 products: our kernels take %.2f ms, torch's %.2f", ours, torchs)
        if torchs < ours:
            device.take_products_of_torch()
    return device


def _milliseconds(kind: Callable[[Tensor], base.Matrix]) -> float:
    """Milliseconds of the products of a request with 512 prompt tokens and 64 new ones, with a
    weight in the given form; best of three trials."""
    matrix, total = kind(torch.randn(2048, 1024).bfloat16()), 0.0
    for rows, times in ((512, 1), (1, 64)):
        hidden, tries = torch.randn(rows, 1024).bfloat16(), []
        for _ in range(3):
            began = time.perf_counter()
            matrix(hidden)
            tries.append(time.perf_counter() - began)
        total += times * min(tries)
    return total * 1000


class CpuDevice(Device):
    """See `Device`."""

    is_deterministic = True
    int8: type[Int8Matrix | PackedInt8Matrix] = Int8Matrix
    int4: type[Int4Matrix | PackedInt4Matrix] = Int4Matrix
    _float_form: Callable[..., base.Matrix] = PackedWeight
    add_norm = staticmethod(add_norm)

    def __init__(self, dtype: torch.dtype, options: base.DeviceOptions) -> None:
        # Our int8 and int4 products need bfloat16 rows and wide vectors.
        if dtype is torch.bfloat16 and kernels.are_vectors_wide():
            self.int8, self.int4 = PackedInt8Matrix, PackedInt4Matrix
        elif options.quantize is not None:
            self.is_deterministic = False
        super().__init__(torch.device("cpu"), dtype, options)
        self._num_ranks = options.world_size
        wanted = Wanted(dtype, options.quantize, has_ranks=self._num_ranks > 1)
        prepare(wanted, torch.get_num_threads(), host.free_bytes())
        # A pass does not wait for a thread that lost its core.
        self.spares_core = num_cores(self._num_ranks) > 1
        self.sums_in_parts = options.deterministic

    def take_products_of_torch(self) -> None:
        """Float products by torch from now on. Their sums depend on the number of rows."""
        self._float_form, self.is_deterministic = OneDnnMatrix, False
        self.spares_core = num_cores(self._num_ranks) > torch.get_num_threads()

    def check_room(self, nbytes: int, kind: str) -> None:
        """See Device. Otherwise the system kills this process without a message while it loads
        weights."""
        group = host.memory_limit()
        if group is not None and nbytes > group.free:
            smaller = "" if kind == "int4" else ", choose a smaller --dtype or --quantize"
            raise ModelError(
                f"the weights take {nbytes / 1e9:.2f} GB in {kind}, and of the memory limit of "
                f"{group.limit / 1e9:.2f} GB that this process runs under (a container's --memory) "
                f"{group.free / 1e9:.2f} GB are left: raise the limit{smaller}, or serve a smaller "
                "model"
            )

    def _forms_of(self, quantize: str | None) -> tuple[Any, ...]:
        return {None: (), "int8": (self.int8,), "int4": (self.int4, self.int8)}[quantize]

    def _float_matrix(self, weight: Tensor, part: int | None) -> base.Matrix:
        return self._float_form(weight, **self._parts(part))

    def _quantized_matrix(
        self, form: Any, weight: Tensor, columns: slice, part: int | None
    ) -> base.Matrix:
        matrix: base.Matrix = form(weight, self.dtype, columns=columns, **self._parts(part))
        return matrix

    def _parts(self, part: int | None) -> dict[str, int]:
        return {} if part is None or not self.sums_in_parts else {"part": part}

    def gated_matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        activation: base.Activation,
        has_bias: bool,
    ) -> base.Matrix:
        """See Device. The kernels support only silu without a bias."""
        if activation is not base.Activation.SILU or has_bias or weight.shape[0] % 32:
            return GatedMatrix(self.matrix(weight, quantize), activation)
        if quantize is None and self._float_form is PackedWeight:
            return PackedWeight(weight.to(self.dtype), is_gated=True)
        form = self.int8 if quantize == "int8" else self.int4
        if quantize is None or not issubclass(form, PackedWeight) or form.obstacle_of(weight):
            return GatedMatrix(self.matrix(weight, quantize), activation)
        return form(weight, self.dtype, is_gated=True)

    def attention(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        scorings: Sequence[Scoring | None] = (),
    ) -> Attention:
        """See Device."""
        if head_dim % 16 or head_dim > kernels.MAX_HEAD_DIM:
            return self._torch_attention(scale, scorings, f"heads of {head_dim} features")
        if any(scorings):
            return super().attention(num_heads, num_kv_heads, head_dim, scale, scorings)
        return PackedAttention(num_heads, num_kv_heads, scale)

    def _make_zeros(self, count: int, num_blocks: int, block_bytes: int) -> Tensor:
        return unwritten_zeros(count, num_blocks, block_bytes)

    def runner(self, model: base.Model) -> base.Runner:
        """See Device."""
        decoder = fused_decoder(model, self.dtype)
        if self.is_deterministic or (decoder is None and self._float_form is PackedWeight):
            # Our kernels compute everything large. They and torch each have a thread pool, whose
            # threads keep the cores busy for a while after their last work. Between operators of
            # both, that makes steps of several rows many times as long.
            torch.set_num_threads(1)
        return CpuRunner(model, decoder, self.upload)

    def free_bytes(self, step_bytes: int, profile_memory: Callable[[], None]) -> base.MemoryBudget:
        """See Device; uses the estimate. All ranks share this machine's memory equally."""
        own = host.free_bytes() // self._num_ranks
        return base.MemoryBudget(max(0, int((own - step_bytes) * _CACHE_SHARE)), step_bytes)

    def collectives(self, rendezvous: Rendezvous, slot_bytes: int) -> Collectives:
        """See Device."""
        return SharedMemoryCollectives.meet(rendezvous, slot_bytes)

    def serve(self) -> None:
        """See Device."""
        host.return_freed_memory()
