"""The JSON files of a model: fields with their types checked, and the vocabulary."""

import json
import math
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from text_generation_process.json_file import content_of, read_object, read_settings

from text_generation_shard.errors import ModelError

# No size of a model is larger, nor a vocabulary; positions are words of 32 bits.
LARGEST_SIZE, LARGEST_POSITION = 1 << 24, (1 << 31) - 1
_LARGEST_NUMBER = 1e38  # float32 holds it
# More of a wrong value is not shown.
_SHOWN = 60


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
