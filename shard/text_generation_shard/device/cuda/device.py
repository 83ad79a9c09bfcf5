"""Opens an NVIDIA GPU. Imports what needs one only where there is one."""

import torch

from text_generation_shard.device.base import Device, DeviceOptions
from text_generation_shard.device.reference.device import DTYPES
from text_generation_shard.errors import ModelError


def open_device(options: DeviceOptions) -> Device:
    """The GPU. ModelError if there is none, or it can not do what the options ask for."""
    if not torch.cuda.is_available():
        raise ModelError("--device cuda was asked for, but torch finds no CUDA device; use cpu")
    if options.quantize is not None:
        raise ModelError(
            f"--quantize {options.quantize} runs on the CPU only; leave it out, or use --device cpu"
        )
    from text_generation_shard.device.cuda.gpu import CudaDevice

    dtype = DTYPES.get(options.dtype or options.checkpoint_dtype, torch.float16)
    return CudaDevice(torch.device("cuda"), dtype, options)
