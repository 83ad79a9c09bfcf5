"""Safetensors files into the tensors a model asked for, one after another."""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_shard.checkpoint import pickles
from text_generation_shard.device.base import Device, WeightCopies
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"


class Split(Enum):
    """What of a matrix each rank has: all, a part of the outputs, or a part of the inputs."""

    NONE = 0
    OUTPUTS = 1
    INPUTS = 2


class Held(Protocol):
    """What became of a matrix; see `device.base.Matrix`."""

    kind: str
    obstacle: str
    nbytes: int


@dataclass(slots=True)
class _Stack:
    """One tensor of this rank that several of the checkpoint fill, one below the other."""

    # Of each tensor, the sizes of its sections, of which each rank has a part.
    sections: Mapping[str, Sequence[int]]
    # Of each output, [in_features] or nothing.
    tail: tuple[int, ...]
    split: Split
    # What a matrix is given to when it is whole.
    receive: Callable[[Tensor], Held] | None
    num_missing: int
    # Of a matrix, made when its first part is read, in the type the device wants it in.
    whole: Tensor | None = None


class Parameters:
    """Owns, until loading is done, the tensors a model is made of, by checkpoint name.

    Layers ask for tensors while they are built. Vectors lie where they will stay; a matrix is put
    together when its first part is read, and is given to its layer with the last.
    """

    def __init__(self, device: Device, world: World, quantize: str | None = None) -> None:
        """`quantize` is int8, int4 or fp8: how layers are to hold their matrices; None: floats."""
        self.device = device
        self.quantize = quantize
        self.nbytes = 0
        self._world = world
        self._stacks: dict[str, _Stack] = {}
        self._ignored: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._obstacles: list[str] = []
        self._after_load: list[Callable[[], None]] = []

    def add(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialized tensor that the checkpoint's tensor `name` will fill."""
        return self._add_tensor({name: shape[:1]}, shape[1:], Split.NONE)

    def add_bias(self, sections: Mapping[str, Sequence[int]], split: Split) -> Tensor:
        """The bias of a matrix that is split so: where its inputs are, each rank has all of it."""
        return self._add_tensor(
            sections, (), Split.OUTPUTS if split is Split.OUTPUTS else Split.NONE
        )

    def _add_tensor(
        self, sections: Mapping[str, Sequence[int]], tail: tuple[int, ...], split: Split
    ) -> Tensor:
        stack = _Stack(sections, tail, split, None, len(sections))
        device = self.device
        stack.whole = torch.empty(
            self._shape(stack), dtype=device.dtype, device=device.torch_device
        )
        self.nbytes += stack.whole.nbytes
        self._stacks.update(dict.fromkeys(sections, stack))
        return stack.whole

    def add_matrix(
        self,
        sections: Mapping[str, Sequence[int]],
        in_features: int,
        split: Split,
        receive: Callable[[Tensor], Held],
    ) -> None:
        """Have this rank's part of the named matrices, one below the other, given to `receive` once
        they are read. sections: of each, the sizes of the projections it stacks.

        The tensor has the type that the device puts matrices together in, and nothing here keeps
        it: what `receive` returns is what is left of it.
        """
        stack = _Stack(sections, (in_features,), split, receive, len(sections))
        self._stacks.update(dict.fromkeys(sections, stack))

    def _shape(self, stack: _Stack) -> tuple[int, ...]:
        """Of this rank's part."""
        rows, tail = sum(sum(sizes) for sizes in stack.sections.values()), stack.tail
        if stack.split is Split.OUTPUTS:
            for size in (size for sizes in stack.sections.values() for size in sizes):
                self._world.share(size, "outputs")
            rows //= self._world.size
        if stack.split is Split.INPUTS:
            tail = (self._world.share(tail[0], "inputs"), *tail[1:])
        return (rows, *tail)

    def ignore(self, name: str) -> None:
        """The checkpoint may hold `name`; it is not read."""
        self._ignored.add(name)

    def after_load(self, action: Callable[[], None]) -> None:
        """Run `action` when every tensor is filled."""
        self._after_load.append(action)

    def load(self, directory: Path) -> None:
        """Fill every tensor from *.safetensors; ModelError names what is missing or unexpected."""
        files = _weight_files(directory)
        kind = self.quantize or str(self.device.dtype).removeprefix("torch.")
        self.device.check_room(self._least_bytes(), kind)
        total = len(self._stacks)
        with self.device.weight_copies() as copies:
            self._read(directory, files, copies)
        logger.info("loading weights: %d of %d tensors", total, total)
        self._stacks.clear()
        for action in self._after_load:
            action()
        self._after_load.clear()
        if self.quantize is not None:
            self._log_quantised()

    def _read(self, directory: Path, files: Sequence[Path], copies: WeightCopies) -> None:
        total, done, spoke = len(self._stacks), 0, time.monotonic()
        missing = set(self._stacks)
        unexpected: list[str] = []
        for path in files:
            for name, tensor in _tensors(path, missing):
                if tensor is not None:
                    self._fill(name, tensor, path, copies)
                    missing.discard(name)
                    done += 1
                elif not self._is_ignored(name):
                    unexpected.append(name)
                if time.monotonic() - spoke > 2:
                    spoke = time.monotonic()
                    logger.info("loading weights: %d of %d tensors", done, total)
        if missing or unexpected:
            raise ModelError(_mismatch(directory, sorted(missing), sorted(unexpected)))

    def _least_bytes(self) -> int:
        """What the tensors take once they are loaded; scales of quantised ones are left out."""
        # A matrix that can not be quantised as asked is larger.
        bits = {"int8": 8, "int4": 4, "fp8": 8}.get(
            self.quantize or "", self.device.dtype.itemsize * 8
        )
        stacks = {id(stack): stack for stack in self._stacks.values()}.values()
        matrices = [stack for stack in stacks if stack.receive is not None]
        return self.nbytes + sum(math.prod(self._shape(stack)) for stack in matrices) * bits // 8

    def _fill(self, name: str, tensor: Tensor, path: Path, copies: WeightCopies) -> None:
        stack = self._stacks[name]
        shape = (sum(stack.sections[name]), *stack.tail)
        if shape != tensor.shape:
            raise ModelError(
                f"{name} in {path.name} has the shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}; config.json and weights are not of the same model"
            )
        if stack.whole is None:
            shape, where = self._shape(stack), self.device.torch_device
            dtype = copies.matrix_dtype or tensor.dtype
            stack.whole = torch.empty(shape, dtype=dtype, device=where)
        first = 0
        for other, sizes in stack.sections.items():
            if other == name:
                break
            first += sum(sizes) // (self._world.size if stack.split is Split.OUTPUTS else 1)
        for part in self._own_parts(stack, name, tensor):
            copies.copy(stack.whole[first : first + len(part)], part)
            first += len(part)
        stack.num_missing -= 1
        if stack.receive is not None and not stack.num_missing:
            whole, stack.whole = stack.whole, None
            copies.then(partial(self._give, name, stack.receive, whole))

    def _give(self, name: str, receive: Callable[[Tensor], Held], whole: Tensor) -> None:
        held = receive(whole)
        self.nbytes += held.nbytes
        self._kinds[held.kind] += 1
        if held.obstacle:
            self._obstacles.append(f"{name} is {held.kind} ({held.obstacle})")

    def _own_parts(self, stack: _Stack, name: str, tensor: Tensor) -> list[Tensor]:
        """What this rank has of a tensor of the checkpoint, one part below the other."""
        rank, size = self._world.rank, self._world.size
        if size == 1 or stack.split is Split.NONE:
            return [tensor]
        if stack.split is Split.INPUTS:
            return [tensor.chunk(size, dim=1)[rank]]
        sections = torch.split(tensor, list(stack.sections[name]))
        return [section.chunk(size)[rank] for section in sections]

    def _log_quantised(self) -> None:
        counts = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        logger.info("quantized weights: %.1f MB, matrices: %s", self.nbytes / 1e6, counts)
        if self._obstacles:
            others = len(self._obstacles) - 1
            more = f", and so are {others} more" if others else ""
            logger.info("not %s: %s%s", self.quantize, self._obstacles[0], more)

    def _is_ignored(self, name: str) -> bool:
        # Old checkpoints carry the rope frequencies, which are computed here.
        return name in self._ignored or name.endswith("rotary_emb.inv_freq")


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from error
        files = [directory / name for name in names]
        if absent := [path.name for path in files if not path.exists()]:
            raise ModelError(
                f"{directory} lacks weight files that {INDEX_NAME} names: {', '.join(absent)}; "
                "download the model again"
            )
        return files
    whole = directory / "model.safetensors"
    # Some checkpoints carry the same weights once more, in Meta's or Mistral's own layout.
    files = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
    files = [path for path in files if not path.name.startswith("consolidated")]
    if not files:
        if pickled := pickles.weight_names([path.name for path in directory.iterdir()]):
            raise ModelError(
                f"{directory} holds {pickled[0]}, which is a pickle, and none is read while "
                f"serving: run `text-generation-server download-weights {directory}` once, which "
                "makes safetensors of it and runs nothing that is in it"
            )
        raise ModelError(
            f"{directory} holds no *.safetensors weights; convert the checkpoint to safetensors "
            "or download it again"
        )
    return files


def _tensors(path: Path, wanted: Container[str]) -> Iterator[tuple[str, Tensor | None]]:
    """What a file holds, by name; None for what is not wanted. Of a tensor nothing is read yet: its
    memory is the file's pages. ModelError if the file is not readable."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name) if name in wanted else None
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable safetensors file ({error}); download it again"
        ) from error


def _mismatch(directory: Path, missing: list[str], unexpected: list[str]) -> str:
    def some(names: list[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    parts = []
    if missing:
        parts.append(f"lack {some(missing)}")
    if unexpected:
        parts.append(f"hold unexpected {some(unexpected)}")
    return (
        f"the weights in {directory} {' and '.join(parts)}; "
        "config.json and weights are not of the same model"
    )
