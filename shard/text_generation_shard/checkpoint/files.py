"""Which files of a repository or of a directory are the model; pickles become safetensors.

A pickle is a program. It is read only in `download-weights`, never while serving, and only with
torch's `weights_only=True`, which allows tensors and containers and runs nothing else.
"""

import fcntl
import json
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from text_generation_shard.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CONVERTED_NAME = "model.safetensors"
# A tensor may have two names. A file whose tensors are larger than this many copies is refused.
_MOST_COPIES = 2
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
WHOLE_NAME = "pytorch_model.bin"
# Pickles in a checkpoint's directory that are not weights, or have another program's layout.
_OTHERS = re.compile(r"training|arg(ument)?s|optimizer|scheduler|rng_state|adapter|consolidated")
INDEX_NAME = "model.safetensors.index.json"
OTHER_WEIGHTS = (*PICKLE_SUFFIXES, ".gguf", ".h5", ".msgpack", ".onnx")


def are_pickled(names: Collection[str]) -> bool:
    """Whether all weights among these files are pickles."""
    is_safe = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return not is_safe and bool(pickle_names(names))


def pickle_names(names: Collection[str]) -> list[str]:
    """The pickled weights among a directory's files, without an index."""
    if WHOLE_NAME in names:
        return [WHOLE_NAME]
    for suffix in PICKLE_SUFFIXES:
        found = [name for name in names if name.endswith(suffix) and not _OTHERS.search(name)]
        if found:
            return sorted(found)
    return []


def check_config(where: str, names: Collection[str]) -> None:
    """ModelError if these files can not be a model."""
    if "config.json" not in names:
        adapter = " (it is a LoRA adapter)" if "adapter_config.json" in names else ""
        raise ModelError(
            f"{where} has no config.json{adapter}: choose a repository with a transformers model"
        )


def weight_names(where: str, names: Collection[str], directory: Path) -> list[str]:
    """The weight files of a model: those in its index, else `model.safetensors`, else all but
    `consolidated`, which is a copy under other names; pickles only if it has nothing else.
    ModelError if there is none, or one is missing."""
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    is_pickled = are_pickled(names)
    if not weights and not is_pickled:
        others = sorted(name for name in names if name.endswith(OTHER_WEIGHTS))
        there = f"only {', '.join(others[:3])}" if others else "no weights at all"
        raise ModelError(
            f"{where} holds {there}, and pytgi loads *.safetensors: convert the checkpoint with "
            "transformers (save_pretrained) or choose another one"
        )
    index_name = PICKLE_INDEX_NAME if is_pickled else INDEX_NAME
    if index_name in names:
        try:
            index = json.loads((directory / index_name).read_text(encoding="utf-8"))
            wanted = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{index_name} of {where} is not an index of weights ({error}): download it again"
            ) from error
        absent = [name for name in wanted if name not in names]
        if absent:
            raise ModelError(
                f"{where} lacks weight files that its index names: {some(absent)}: complete it"
            )
        return wanted
    if is_pickled:
        return pickle_names(names)
    if CONVERTED_NAME in names:
        return [CONVERTED_NAME]
    return [name for name in weights if not name.startswith("consolidated")] or weights


def some(names: Sequence[str]) -> str:
    """The first of many names, for a sentence."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_directory(directory: Path) -> list[str]:
    """The weight files of a directory. ModelError unless it has a configuration and all weights."""
    check_config(str(directory), existing(directory))
    return weight_names(str(directory), existing(directory), directory)


def existing(directory: Path) -> set[str]:
    """The names in a directory, without broken links."""
    return {path.name for path in directory.iterdir() if path.exists()}


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
