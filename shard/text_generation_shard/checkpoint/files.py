"""Which files of a repository or of a directory are the model, and the JSON in them: fields with
their types checked, and the vocabulary. Pickles become safetensors.

A pickle is a program. It is read only in `download-weights`, never while serving, and only with
torch's `weights_only=True`, which allows tensors and containers and runs nothing else.
"""

import fcntl
import json
import logging
import math
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from text_generation_process.json_file import content_of, read_object, read_settings

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
# No size of a model is larger, nor a vocabulary; positions are words of 32 bits.
LARGEST_SIZE, LARGEST_POSITION = 1 << 24, (1 << 31) - 1
_LARGEST_NUMBER = 1e38  # float32 holds it
# More of a wrong value is not shown.
_SHOWN = 60
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
    unfinished = directory / f"{CONVERTED_NAME}.partial"
    try:
        # One process converts; other processes wait, then find the result.
        with _locked(unfinished):
            try:
                if not target.exists():
                    save_file(_tensors(directory, names), unfinished, {"format": "pt"})
                    os.replace(unfinished, target)
            finally:
                unfinished.unlink(missing_ok=True)
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError if there is none."""
    if not path.exists():
        raise ModelError(
            f"{path.parent} has no {path.name}; a model directory needs config.json, "
            "tokenizer.json and *.safetensors"
        )
    try:
        return read_object(path)
    except ValueError as error:
        raise ModelError(str(error)) from error


class Fields:
    """The fields of one JSON object. Every method raises ModelError, which names the field and its
    value, if it has another type or is out of range. Null is a value; only `find` skips it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """`where`: the file, and the field in it if the object is one."""
        self.values, self.where = values, where

    def find(self, *names: str) -> str | None:
        """The first of these fields that is there and not null."""
        return next((name for name in names if self.values.get(name) is not None), None)

    def size(self, name: str, most: int = LARGEST_SIZE, least: int = 1) -> int:
        """A whole number."""
        value: Any = self.values.get(name)
        if _is(float, value) and least <= value <= most and value == int(value):
            return int(value)
        raise self.wrong(name, f"a whole number from {least} to {most}")

    def number(self, name: str, above: float = 0.0) -> float:
        """A number that float32 holds, above this one."""
        value: Any = self.values.get(name)
        if _is(float, value) and above < value:
            return float(value)
        raise self.wrong(name, "a number" if above == -math.inf else f"a number above {above:g}")

    def flag(self, name: str) -> bool:
        """True or false; null and a missing field are false."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.wrong(name, "true or false")

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self.values.get(name)
        if isinstance(value, str) and value:
            return value
        raise self.wrong(name, "a text")

    def items(self, name: str, kind: type, least: int) -> list[Any]:
        """A list of at least `least` items of a kind: float (any number), int or str."""
        value, is_right = self.values.get(name), partial(_is, kind)
        if isinstance(value, list) and len(value) >= least and all(map(is_right, value)):
            return value
        words = {float: "numbers", int: "whole numbers", str: "texts"}[kind]
        raise self.wrong(name, f"a list of {least} {words}" if least else f"a list of {words}")

    def inner(self, name: str) -> "Fields":
        """The fields of the object in a field; of an empty one if it is null or missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value or {}, f"`{name}` of {self.where}")

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error that names a field, its value and what was expected."""
        if name not in self.values:
            return ModelError(f"{self.where} has no `{name}`; expected {expected}")
        shown = json.dumps(self.values[name])
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        return ModelError(f"`{name}` in {self.where} is {shown}; expected {expected}")


def _is(kind: type, value: Any) -> bool:
    """Whether a value is of a kind; float: any number that float32 holds, and no bool."""
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and abs(value) < _LARGEST_NUMBER
    return isinstance(value, kind)


class Vocabulary(NamedTuple):
    """The ids in tokenizer.json; and the id of the `eos_token` that the files beside it name."""

    ids: Set[int]
    end_id: int | None


def read_vocabulary(directory: Path) -> Vocabulary:
    """The model's vocabulary; empty without a tokenizer.json. ModelError if a file is not JSON; the
    router, which tokenizes, reports what else is wrong with it."""
    if not (directory / "tokenizer.json").is_file():
        return Vocabulary(frozenset(), None)
    tokenizer = read_json(directory / "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    # A unigram model lists its tokens with their scores.
    ids = dict(tokens) if isinstance(tokens, dict) else {}
    ids |= {index: index for index in range(len(tokens) if isinstance(tokens, list) else 0)}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            ids[token["content"]] = token.get("id")
    end_id = ids.get(content_of(read_settings(directory).get("eos_token")))
    used = {token_id for token_id in ids.values() if isinstance(token_id, int)}
    return Vocabulary(used, end_id if isinstance(end_id, int) else None)
