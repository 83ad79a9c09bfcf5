"""What hardware there is, and how a model is computed on it. Light: it imports no device."""

from importlib import import_module
from typing import TYPE_CHECKING

from text_generation_shard.device.cpu.host import prepare_process

if TYPE_CHECKING:
    from text_generation_shard.device.base import Device, DeviceOptions

__all__ = ["DEVICES", "open_device", "prepare_process"]

DEVICES = {
    "cpu": "text_generation_shard.device.cpu.device",
    "cuda": "text_generation_shard.device.cuda.device",
}
"""--device → the module that has `open_device(options)` for it."""


def open_device(name: str | None, options: "DeviceOptions") -> "Device":
    """The device of this name, or the best there is. ModelError if it is not there, or can not do
    what the options ask for."""
    if name is None:
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    device: Device = import_module(DEVICES[name]).open_device(options)
    return device
