"""A device with our Triton kernels: attention, norms, gates, and quantized products; and an NVIDIA
GPU, with its memory, stream and collectives."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor
from torch._C import _distributed_c10d

from text_generation_shard.arrays import Ints
from text_generation_shard.device import base
from text_generation_shard.device.base import Attention, Scoring
from text_generation_shard.device.cuda import sampler
from text_generation_shard.device.cuda.attention import HeadShape, TritonAttention, suits_flash
from text_generation_shard.device.cuda.kernels import launch, layers
from text_generation_shard.device.cuda.matrices import FORMS, OneTileMatrix
from text_generation_shard.device.cuda.runner import CudaStream, Stream, StreamRunner
from text_generation_shard.device.cuda.staging import pinned_copies, pinned_upload
from text_generation_shard.device.reference.device import Device
from text_generation_shard.device.reference.matrices import FloatMatrix
from text_generation_shard.device.reference.runner import EagerForward
from text_generation_shard.errors import ModelError, RankError
from text_generation_shard.parallel import Collectives, Rendezvous, try_out

logger = logging.getLogger(__name__)

# Features per program of `gate`.
_GATE_TILE = 1024


def gate(activation: base.Activation, both: Tensor) -> Tensor:
    """See `reference.matrices.gate`: one kernel."""
    size = both.shape[1] // 2
    out = both.new_empty(len(both), size)
    tile = min(_GATE_TILE, triton.next_power_of_2(size))
    launch(
        layers.gate,
        (len(both), -(-size // tile)),
        (both, out),
        SIZE=size,
        TILE=tile,
        ACTIVATION=activation.value,
    )
    return out


class TritonDevice(Device):
    """See `Device`. Float and fp8 products are torch's; int8 and int4 products, and with
    --deterministic all products, are one Triton kernel. Norm, rotation and gate are one kernel
    each. With TRITON_INTERPRET=1 it also runs on CPU tensors."""

    capability = 0
    """See `decode_tile`."""
    num_spare_blocks = 1
    cache_dtypes = MappingProxyType(
        {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    )
    stream = Stream()
    _gate = staticmethod(gate)

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: base.DeviceOptions
    ) -> None:
        # fp8 products are torch's, whose sums may depend on the number of rows.
        self.is_deterministic = options.deterministic and options.quantize != "fp8"
        super().__init__(torch_device, dtype, options)
        self._cuda_graphs = options.cuda_graphs

    def _forms_of(self, quantize: str | None) -> Sequence[Any]:
        return FORMS[quantize]

    def _float_matrix(self, weight: Tensor, part: int | None) -> base.Matrix:
        return (OneTileMatrix if self.is_deterministic else FloatMatrix)(weight)

    def _quantized_matrix(
        self, form: Any, weight: Tensor, columns: slice, part: int | None
    ) -> base.Matrix:
        matrix: base.Matrix = form(weight, self.dtype, self.is_deterministic, columns)
        return matrix

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
    ) -> Tensor:
        """See Device."""
        out, size = torch.empty_like(hidden), hidden.shape[1]
        launch(
            layers.add_norm,
            (len(hidden),),
            (hidden, delta, weight, out, multiplier),
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
        found = TritonAttention(
            shape,
            self.torch_device,
            self.capability,
            takes_flash=suits_flash(shape, self.dtype, self.capability),
            upload=self.upload,
            is_deterministic=self.is_deterministic,
        )
        logger.info("attention: %s", found.name)
        return found

    def runner(self, model: base.Model) -> StreamRunner:
        """See Device."""
        found = StreamRunner(
            model,
            EagerForward(model),
            self._cuda_graphs,
            self.stream,
            partial(sampler.begin, self.upload),
            self.torch_device,
            self.upload,
        )
        # `free_bytes` reserves memory for the graphs.
        self._graphs = found.graphs
        return found


def _num_warps(size: int) -> int:
    """Never more threads than features: two threads with the same feature would race, because one
    may load it after the other has stored the sum."""
    return 8 if size >= 4096 else 4 if size >= 128 else 1


class NcclCollectives:
    """See `Collectives`. Owns a process group of torch.distributed; there is no global one.

    Operations run in the current stream and do not block the host, so a CUDA graph may record them.
    Ranks exchange sums rounded to the tensors' dtype; all ranks get the same bits. If an operation
    exceeds the deadline, the group's watchdog thread ends this process. It does not see operations
    inside a graph; there the step's own deadline applies.
    """

    name = "nccl"

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """All ranks call this at the same time. device: the GPU of this rank."""
        nccl: Any = _distributed_c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=rendezvous.deadline_s)
        self.rank, self.size, self._device = rendezvous.rank, rendezvous.size, device
        self._group: Any = nccl(rendezvous.store, rendezvous.rank, rendezvous.size, options)
        self._number = 0
        self._deadline_s = rendezvous.deadline_s
        # Rank 0 serves the store as long as its rendezvous exists.
        self._rendezvous = rendezvous

    def wait_at_most(self, seconds: float) -> float:
        """See Collectives: the deadline of an NCCL group can not be changed."""
        return self._deadline_s

    def begin(self, number: int) -> None:
        """See Collectives."""
        self._number = number

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        partial = partial.contiguous()
        self._wait(lambda group: group.allreduce([partial]))
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([parts], [part]))
        return torch.cat(parts, dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        sent = torch.from_numpy(values).to(self._device)
        self._wait(lambda group: group.broadcast(sent, 0))
        values[...] = sent.cpu().numpy()
        return values

    def fail(self, number: int) -> None:
        """See Collectives; final for all ranks, because operations in a stream can not be
        undone."""
        self.stop()

    def stop(self) -> None:
        """See Collectives; operations in progress are aborted."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _wait(self, operation: Any) -> None:
        """Start an operation of the group; the current stream waits for it, the host does not."""
        group = self._group
        if group is None:
            raise RankError(
                f"this shard has left the group (message {self._number})", is_final=True
            )
        try:
            operation(group).wait()
        except RuntimeError as error:
            raise RankError(
                f"another shard has failed or did not answer (message {self._number}; "
                f"{str(error).splitlines()[0]})",
                is_final=True,
            ) from error


class CudaDevice(TritonDevice):
    """See `Device`."""

    runs_behind = True

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: base.DeviceOptions
    ) -> None:
        super().__init__(torch_device, dtype, options)
        major, minor = torch.cuda.get_device_capability(torch_device)
        self.capability = 10 * major + minor
        self._is_quantized = options.quantize is not None
        self.stream = CudaStream()
        self.upload = pinned_upload(torch_device)

    def check_room(self, nbytes: int, kind: str) -> None:
        """See Device."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        if nbytes > free:
            raise ModelError(
                f"the weights take {nbytes / 1e9:.2f} GB in {kind}, and {free / 1e9:.2f} GB of the "
                "GPU's memory are free; use a smaller --dtype or --quantize, a smaller model or a "
                "larger GPU"
            )

    def collectives(self, rendezvous: Rendezvous, slot_bytes: int) -> Collectives:
        """See Device; there are no slots."""
        found = NcclCollectives(rendezvous, self.torch_device)
        try_out(found, rendezvous, str(self.torch_device))
        return found

    def weight_copies(self) -> AbstractContextManager[base.WeightCopies]:
        """See Device. A float matrix is loaded in its final dtype, so that the GPU never holds more
        than the weights. A matrix to be quantized is loaded in the checkpoint's dtype, so that it
        is rounded only once; until then it takes additional memory."""
        return pinned_copies(self.torch_device, None if self._is_quantized else self.dtype)

    def free_bytes(self, step_bytes: int, profile_memory: Callable[[], None]) -> base.MemoryBudget:
        """See Device. Reserves the peak of the memory profile, and the memory of all graphs,
        extrapolated from two."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        profile_memory()
        held = torch.cuda.memory_allocated(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device) - held
        graphs = self._graphs.bytes_of_all(self._held)
        free, total = self._free_and_total()
        # 5 % reserve for fragmentation and allocations of libraries.
        kept = (1.0 - self._memory_fraction * 0.95) * total
        cache = max(0, int(free - peak - graphs - kept))
        return base.MemoryBudget(cache, peak, graphs)

    def release_memory(self) -> None:
        """See Device."""
        torch.cuda.empty_cache()

    def _held(self) -> int:
        """Bytes in use."""
        free, total = self._free_and_total()
        return total - free

    def _free_and_total(self) -> tuple[int, int]:
        """Free and total bytes, after torch has released its cached memory."""
        self.release_memory()
        return torch.cuda.mem_get_info(self.torch_device)
