"""Converts pickled checkpoints to safetensors.

A pickle is a program. It is read only in `download-weights`, never while serving, and only with
torch's `weights_only=True`, which allows tensors and containers and runs nothing else.
"""

import fcntl
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from text_generation_shard.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CONVERTED_NAME = "model.safetensors"
# A tensor may have two names. A file whose tensors are larger than this many copies is refused.
_MOST_COPIES = 2


def convert(directory: Path, names: Sequence[str]) -> None:
    """Write the tensors of these files into the directory's model.safetensors, atomically. Raises
    ModelError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = directory / CONVERTED_NAME
    partial = directory / f"{CONVERTED_NAME}.partial"
    try:
        # One process converts; other processes wait, then find the result.
        with _locked(partial):
            try:
                if not target.exists():
                    save_file(_tensors(directory, names), partial, {"format": "pt"})
                    os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"can not write {target} ({error}): free space there and let this "
            "user write there, or convert the checkpoint elsewhere"
        ) from error


def _locked(path: Path) -> BinaryIO:
    """Open and lock the file, new or left over, until it is closed."""
    while True:
        # Does not follow a link, which another user could have made.
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = open(number, "wb")  # noqa: SIM115 - the caller closes it
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(number), path.stat()):
            return file
        file.close()  # the previous owner has renamed or removed it


def _tensors(directory: Path, names: Sequence[str]) -> "dict[str, Tensor]":
    """The tensors of these files, memory-mapped; a copy of each that another one overlaps."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    num_bytes = sum((directory / name).stat().st_size for name in names)
    for name in names:
        found = _read(directory / name)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelError(f"{directory / name} holds {twice[0]}, and so does a file before it")
        tensors.update(found)
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if total > _MOST_COPIES * num_bytes:
        raise ModelError(
            f"the tensors of {', '.join(names[:3])} in {directory} take {total} bytes, and the "
            f"files have {num_bytes}: this is not a checkpoint; download it again, as *.safetensors"
        )
    logger.info("converting %s to %s: %.1f MB", ", ".join(names[:3]), CONVERTED_NAME, total / 1e6)
    for name, tensor in tensors.items():
        # safetensors refuses tensors that share memory.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read(path: Path) -> "dict[str, Tensor]":
    """The tensors of a pickled file, memory-mapped."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            # As torch writes it since 1.6: reading takes no more memory than the file has bytes.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, which torch never does")
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, Mapping) or not content:
            raise ValueError("it holds no table of tensors")
        for name, tensor in content.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{str(name)[:80]} is not a tensor")
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise ValueError(f"{name[:80]} is of a kind that safetensors does not have")
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        raise ModelError(
            f"{path} is refused: it imports {wanted[1] if wanted else 'something'}, which weights "
            "do not need, and none of its code was run; get the checkpoint as *.safetensors from a "
            "source you trust"
        ) from error
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{path} is not a checkpoint that can be converted ({reason}): make one with "
            "transformers, save_pretrained(...), or get it as *.safetensors"
        ) from error
    return {name: tensor.detach() for name, tensor in content.items()}
