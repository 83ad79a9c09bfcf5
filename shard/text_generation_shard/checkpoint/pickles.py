"""Converts pickled checkpoints to safetensors.

A pickle is a program. It is read only in `download-weights`, never while serving, and only with
torch's `weights_only=True`, which allows tensors and containers and runs nothing else.
"""

import fcntl
import json
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from text_generation_shard.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

SUFFIXES = (".bin", ".pt", ".pth")
INDEX_NAME = "pytorch_model.bin.index.json"
WHOLE_NAME = "pytorch_model.bin"
CONVERTED_NAME = "model.safetensors"
# Pickles in a checkpoint's directory that are not weights, or have another program's layout.
_OTHERS = re.compile(r"training|arg(ument)?s|optimizer|scheduler|rng_state|adapter|consolidated")
# The names in safetensors of torch's types.
_KINDS = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
# A tensor may have two names. A file whose tensors are larger than this many copies is refused.
_MOST_COPIES = 2


def are_all(names: Collection[str]) -> bool:
    """Whether all weights among these files are pickles."""
    is_safe = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return not is_safe and bool(weight_names(names))


def weight_names(names: Collection[str]) -> list[str]:
    """The pickled weights among a directory's files, without an index."""
    if WHOLE_NAME in names:
        return [WHOLE_NAME]
    for suffix in SUFFIXES:
        found = [name for name in names if name.endswith(suffix) and not _OTHERS.search(name)]
        if found:
            return sorted(found)
    return []


def convert(directory: Path, names: Sequence[str]) -> None:
    """Write the tensors of these files into the directory's model.safetensors, atomically and with
    one tensor in memory at a time. Raises ModelError."""
    target = directory / CONVERTED_NAME
    partial = directory / f"{CONVERTED_NAME}.partial"
    try:
        # One process converts; other processes wait, then find the result.
        with _locked(partial) as file:
            try:
                if not target.exists():
                    _convert(directory, names, file)
                    os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(
            f"can not write {target} ({error.strerror or error}): free space there and let this "
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


def _convert(directory: Path, names: Sequence[str], file: BinaryIO) -> None:
    tensors: dict[str, Tensor] = {}
    for name in names:
        found = _read(directory / name)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelError(f"{directory / name} holds {twice[0]}, and so does a file before it")
        tensors.update(found)
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    there = sum((directory / name).stat().st_size for name in names)
    if total > _MOST_COPIES * there:
        raise ModelError(
            f"the tensors of {', '.join(names[:3])} in {directory} take {total} bytes, and the "
            f"files have {there}: this is not a checkpoint; download it again, as *.safetensors"
        )
    free = shutil.disk_usage(directory).free
    if total > free:
        raise ModelError(
            f"converting the pickled weights in {directory} needs {total / 1e9:.1f} GB, and its "
            f"disk has {free / 1e9:.1f} GB left: free some"
        )
    what = names[0] if len(names) == 1 else f"{len(names)} pickled files"
    logger.info("converting %s to %s: %.1f MB", what, CONVERTED_NAME, total / 1e6)
    file.truncate(0)
    _write(tensors, file)
    file.flush()
    os.fsync(file.fileno())


def _read(path: Path) -> "dict[str, Tensor]":
    """The tensors of a pickled file, memory-mapped."""
    import torch

    _check_container(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        raise ModelError(
            f"{path} is refused: it imports {wanted[1] if wanted else 'something'}, which weights "
            "do not need, and none of its code was run; get the checkpoint as *.safetensors from a "
            "source you trust"
        ) from error
    except Exception as error:
        raise _unreadable(path, (str(error) or type(error).__name__).splitlines()[0]) from error
    if not isinstance(content, Mapping) or not content:
        raise _unreadable(path, "it holds no table of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise _unreadable(path, f"{str(name)[:80]} is not a tensor")
        kind = str(tensor.dtype).removeprefix("torch.")
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if kind not in _KINDS or not is_plain:
            raise _unreadable(path, f"{name[:80]} is of a kind that safetensors does not have")
    return {name: tensor.detach() for name, tensor in content.items()}


def _check_container(path: Path) -> None:
    """ModelError unless it is an uncompressed archive: then reading takes no more memory than the
    file has bytes."""
    if not zipfile.is_zipfile(path):
        raise _unreadable(path, "it is not the archive that torch writes since 1.6")
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise _unreadable(path, "it is compressed, which torch never does")


def _unreadable(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path} is not a checkpoint that can be converted ({reason}): make one with transformers, "
        "save_pretrained(...), or get it as *.safetensors"
    )


def _write(tensors: "Mapping[str, Tensor]", file: BinaryIO) -> None:
    """Write safetensors: a header with the place of each tensor, then the tensors. Types with more
    bytes come first, so that each tensor is aligned."""
    import torch

    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        kind = _KINDS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        values = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        file.write(values.numpy().data)
