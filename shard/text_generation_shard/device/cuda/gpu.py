"""An NVIDIA GPU: its memory, stream and collectives."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from text_generation_shard.device.base import DeviceOptions, MemoryBudget, Model, WeightCopies
from text_generation_shard.device.cuda.collectives import NcclCollectives
from text_generation_shard.device.cuda.operators import TritonDevice
from text_generation_shard.device.cuda.runner import CudaStream, StreamRunner
from text_generation_shard.device.cuda.staging import pinned_copies, pinned_upload
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import Collectives, Rendezvous


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
        return NcclCollectives.meet(rendezvous, self.torch_device)

    def weight_copies(self) -> AbstractContextManager[WeightCopies]:
        """See Device. A float matrix is loaded in its final dtype, so that the GPU never holds more
        than the weights. A matrix to be quantized is loaded in the checkpoint's dtype, so that it
        is rounded only once; until then it takes additional memory."""
        return pinned_copies(self.torch_device, None if self._is_quantized else self.dtype)

    def runner(self, model: Model) -> StreamRunner:
        """See Device."""
        found = super().runner(model)
        # `free_bytes` reserves memory for the graphs.
        self._graphs = found.graphs
        return found

    def free_bytes(self, step_bytes: int, profile_memory: Callable[[], None]) -> MemoryBudget:
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
        return MemoryBudget(cache, peak, graphs)

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
