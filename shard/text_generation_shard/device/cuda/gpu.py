"""An NVIDIA GPU: its memory, and which operators it has."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from text_generation_shard.device.base import DeviceOptions, Room, WeightCopies
from text_generation_shard.device.cuda.operators import TritonDevice
from text_generation_shard.device.cuda.runner import CudaStream
from text_generation_shard.device.cuda.staging import PinnedBuffer, pinned_copies
from text_generation_shard.device.cuda.uploads import Uploads
from text_generation_shard.errors import ModelError


class CudaDevice(TritonDevice):
    """See `Device`."""

    runs_behind = True

    def __init__(
        self, torch_device: torch.device, dtype: torch.dtype, options: DeviceOptions
    ) -> None:
        super().__init__(torch_device, dtype, options)
        major, minor = torch.cuda.get_device_capability(torch_device)
        self.capability = 10 * major + minor
        self._is_quantized = options.quantize is not None
        stream = torch.cuda.current_stream(torch_device)
        self.stream = CudaStream()
        self.upload = Uploads(torch_device, partial(PinnedBuffer, stream=stream))

    def check_room(self, nbytes: int, kind: str) -> None:
        """See Device."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        if nbytes > free:
            raise ModelError(
                f"the weights take {nbytes / 1e9:.2f} GB in {kind}, and {free / 1e9:.2f} GB of the "
                "GPU's memory are free; use a smaller --dtype or --quantize, a smaller model or a "
                "larger GPU"
            )

    def weight_copies(self) -> AbstractContextManager[WeightCopies]:
        """See Device. A matrix has the type it will be kept in, so that the GPU never holds more
        than the weights; one that is quantised the checkpoint's, so that it is rounded once, and
        until then the GPU holds it beside those that were."""
        return pinned_copies(self.torch_device, None if self._is_quantized else self.dtype)

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
