"""Opens an NVIDIA GPU. Imports GPU modules only if there is a GPU."""

import logging
import os
import tempfile
from pathlib import Path

import torch

from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.reference.device import DTYPES, Device
from text_generation_shard.errors import ModelError
from text_generation_shard.trusted_folders import temporary_folder, why_untrusted

logger = logging.getLogger(__name__)

# Least compute capability (10 * major + minor) for bfloat16.
_FIRST_WITH_BFLOAT16 = 80
# Least compute capability for which our kernels compile with a KV cache of this type.
FIRST_WITH_CACHE = {"fp8_e4m3fn": 89, "fp8_e5m2": 80}
FIRST_WITH_FLOAT8 = 89
"""Least compute capability for products in fp8."""


def open_device(options: DeviceOptions) -> Device:
    """Open the GPU. Raises ModelError if there is none or it does not support the options."""
    if not torch.cuda.is_available():
        if options.world_size > 1:
            raise ModelError(
                f"shard {options.rank} of {options.world_size} has no GPU of its own: use as many "
                "shards as there are GPUs, or --device cpu"
            )
        raise ModelError("--device cuda: torch finds no CUDA device; use --device cpu")
    choose_directory()
    from text_generation_shard.device.cuda.operators import CudaDevice

    torch_device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(torch_device)
    capability = 10 * major + minor
    check_cache_dtype(options, capability)
    check_quantization(options, capability)
    return CudaDevice(torch_device, dtype_of(options, capability), options)


def check_cache_dtype(options: DeviceOptions, capability: int) -> None:
    """Raise ModelError if the GPU does not support the requested KV cache dtype."""
    first = FIRST_WITH_CACHE.get(options.kv_cache_dtype or "", 0)
    if capability < first:
        raise ModelError(
            f"--kv-cache-dtype {options.kv_cache_dtype} needs a GPU of compute capability "
            f"{first / 10} or newer, and this one has {capability / 10}; leave it out"
            + (", or use fp8_e5m2" if capability >= FIRST_WITH_CACHE["fp8_e5m2"] else "")
        )


def check_quantization(options: DeviceOptions, capability: int) -> None:
    """Raise ModelError if the GPU does not support the requested quantization."""
    if options.quantize == "fp8" and capability < FIRST_WITH_FLOAT8:
        raise ModelError(
            f"--quantize fp8 needs a GPU of compute capability {FIRST_WITH_FLOAT8 / 10} or newer, "
            f"and this one has {capability / 10}; use int8 or int4"
        )


def dtype_of(options: DeviceOptions, capability: int) -> torch.dtype:
    """The dtype of activations: the requested one; else the checkpoint's, if it has 16 bits; else
    bfloat16, which has the range of float32, while values above 65504 overflow in float16. GPUs
    without bfloat16 use float16."""
    if options.dtype is not None:
        return DTYPES[options.dtype]
    if options.checkpoint_dtype in ("float16", "bfloat16"):
        return DTYPES[options.checkpoint_dtype]
    name = "bfloat16" if capability >= _FIRST_WITH_BFLOAT16 else "float16"
    logger.info(
        "the checkpoint is %s, weights are converted to %s; --dtype float32 keeps full precision",
        options.checkpoint_dtype,
        name,
    )
    return DTYPES[name]


def choose_directory() -> None:
    """Set TRITON_CACHE_DIR: the user's value, else the home directory. If that is not writable, or
    other users can write to it, a temporary folder: Triton runs the code it reads there. Raises
    OSError with a sentence if no folder is writable."""
    path = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
    if reason := _why_unusable(path):
        other = temporary_folder("pytgi-triton")
        logger.warning("compiled kernels are not cached in %s but in %s: %s", path, other, reason)
        path = other
    os.environ["TRITON_CACHE_DIR"] = str(path)


def _why_unusable(path: Path) -> str:
    if path.parts[0] == "~":
        return "this user has no home directory"
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return error.strerror or str(error)
    return why_untrusted(path)
