"""Any device that torch knows, by torch's own operators: the specification of all others."""

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_shard.device.base import (
    Angles,
    Attention,
    Device,
    DeviceOptions,
    EmbeddingTable,
    Matrix,
    Model,
    Room,
    Rotation,
    Runner,
)
from text_generation_shard.device.reference.attention import TorchAttention
from text_generation_shard.device.reference.linear import FloatMatrix, FloatTable, GatedMatrix
from text_generation_shard.device.reference.rotation import TorchRotation
from text_generation_shard.device.reference.runner import EagerForward, TorchRunner
from text_generation_shard.errors import ModelError
from text_generation_shard.sampling.sampler import sample

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def open_device(options: DeviceOptions) -> Device:
    """The GPU. ModelError if there is none, or it can not do what the options ask for."""
    if not torch.cuda.is_available():
        raise ModelError("--device cuda was asked for, but torch finds no CUDA device; use cpu")
    if options.quantize is not None:
        raise ModelError(
            f"--quantize {options.quantize} runs on the CPU only; leave it out, or use --device cpu"
        )
    dtype = DTYPES.get(options.dtype or options.checkpoint_dtype, torch.float16)
    return TorchDevice(torch.device("cuda"), dtype, options)


def refuse_determinism(device: Device, why: str = "") -> ModelError:
    """What is said where --deterministic can not be kept."""
    return ModelError(
        "--deterministic can not be kept by the operators that compute this model here "
        f"({why}{device.dtype}, {device.name}); leave it out, or use --device cpu with --dtype "
        "float32 or bfloat16"
    )


class TorchDevice:
    """See `Device`."""

    is_deterministic = False
    runs_behind = False
    spares_core = True

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: DeviceOptions
    ) -> None:
        self.name = torch_device.type
        self.torch_device, self.dtype = torch_device, dtype
        self._memory_fraction = options.memory_fraction
        self._must_be_deterministic = options.deterministic
        if options.deterministic and not self.is_deterministic:
            raise refuse_determinism(self)

    def check_room(self, nbytes: int, kind: str) -> None:
        """See Device."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        if nbytes > free:
            raise ModelError(
                f"the weights take {nbytes / 1e9:.2f} GB in {kind}, and {free / 1e9:.2f} GB of the "
                "GPU's memory are free; use --dtype bfloat16, a smaller model or a larger GPU"
            )

    def matrix(self, weight: Tensor, quantize: str | None) -> Matrix:
        """See Device; nothing is quantised."""
        return FloatMatrix(weight.to(self.dtype))

    def gated_matrix(
        self,
        weight: Tensor,
        quantize: str | None,
        activation: Callable[[Tensor], Tensor],
        has_bias: bool,
    ) -> Matrix:
        """See Device."""
        return GatedMatrix(self.matrix(weight, quantize), activation)

    def embedding(self, weight: Tensor, quantize: str | None) -> EmbeddingTable:
        """See Device."""
        return FloatTable(weight.to(self.dtype), lambda table: self.matrix(table, None))

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
    ) -> Tensor:
        """See Device. One copy in float32, all else in place."""
        if delta is not None:
            hidden.add_(delta, alpha=multiplier)
        wide = hidden.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().mul_(1.0 / hidden.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(inverse).mul_(weight).to(hidden.dtype)

    def rotation(self, angles: Angles) -> Rotation:
        """See Device."""
        return TorchRotation(angles, self.dtype)

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Attention:
        """See Device."""
        return TorchAttention(self._make_zeros)

    def _make_zeros(self, count: int, num_blocks: int, block_bytes: int) -> Tensor:
        return torch.zeros(
            count * num_blocks * block_bytes, dtype=torch.uint8, device=self.torch_device
        )

    def runner(self, model: Model) -> Runner:
        """See Device."""
        return TorchRunner(
            model, EagerForward(model), sample, lambda: torch.cuda.synchronize(self.torch_device)
        )

    def free_bytes(self, step_bytes: int, rest_bytes: int, rehearse: Callable[[], None]) -> Room:
        """See Device. What the rehearsal took at its peak will be needed again."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        rehearse()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_allocated(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device) - held
        cached = torch.cuda.memory_reserved(self.torch_device) - held
        # 5 % of slack for fragmentation and what libraries allocate on their own.
        kept = (1.0 - self._memory_fraction * 0.95) * total
        return Room(max(0, int(free + cached - peak - kept) - rest_bytes), peak + rest_bytes)

    def left_bytes(self, cache_bytes: int, step_bytes: int) -> int:
        """See Device."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_allocated(self.torch_device)
        return max(0, free + torch.cuda.memory_reserved(self.torch_device) - held - step_bytes)

    def serve(self) -> None:
        """See Device: nothing."""
