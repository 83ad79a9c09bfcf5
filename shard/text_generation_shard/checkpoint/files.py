"""Which files of a repository or of a directory are the model."""

import json
import re
from collections.abc import Collection
from pathlib import Path

from text_generation_shard.errors import ModelError

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
    if not any(name.endswith(".safetensors") for name in names) and not are_pickled(names):
        others = sorted(name for name in names if name.endswith(OTHER_WEIGHTS))
        there = f"only {', '.join(others[:3])}" if others else "no weights at all"
        raise ModelError(
            f"{where} holds {there}, and pytgi loads *.safetensors: convert the checkpoint with "
            "transformers (save_pretrained) or choose another one"
        )
    index_name = PICKLE_INDEX_NAME if are_pickled(names) else INDEX_NAME
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
                f"{where} lacks weight files that its index names: {', '.join(absent[:3])}"
                f"{f' and {len(absent) - 3} more' if len(absent) > 3 else ''}: complete it"
            )
        return wanted
    if are_pickled(names):
        return pickle_names(names)
    if "model.safetensors" in names:
        return ["model.safetensors"]
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    return [name for name in weights if not name.startswith("consolidated")] or weights


def check_directory(directory: Path) -> list[str]:
    """The weight files of a directory. ModelError unless it has a configuration and all weights."""
    check_config(str(directory), existing(directory))
    return weight_names(str(directory), existing(directory), directory)


def existing(directory: Path) -> set[str]:
    """The names in a directory, without broken links."""
    return {path.name for path in directory.iterdir() if path.exists()}
