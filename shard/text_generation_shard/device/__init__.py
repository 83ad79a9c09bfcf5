"""The devices by name. Importing this package imports no device, and not torch, which reads the
environment that `prepare_process` sets."""

from importlib import import_module
from typing import TYPE_CHECKING

from text_generation_shard.device.cpu.host import prepare_process

if TYPE_CHECKING:
    from text_generation_shard.device.base import DeviceOptions
    from text_generation_shard.device.reference.device import Device

__all__ = ["DEVICES", "open_device", "prepare_process"]

DEVICES = {
    "cpu": "text_generation_shard.device.cpu.device",
    "cuda": "text_generation_shard.device.cuda.device",
}
"""Value of --device → module with its `open_device(options)`."""


def open_device(name: str | None, options: "DeviceOptions") -> "Device":
    """Open the device of this name; None: cuda if available, else cpu. Raises ModelError if it is
    not available or does not support the options."""
    if name is None:
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    device: Device = import_module(DEVICES[name]).open_device(options)
    return device
