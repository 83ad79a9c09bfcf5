"""Safetensors files into the tensors a model asked for, one after another."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_shard.checkpoint import pickles
from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.device.base import Device, WeightCopies
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"


Sections = Mapping[str, Sequence[Share]]
"""Of each tensor of the checkpoint, what this rank has of the projections that it stacks."""


class Held(Protocol):
    """What became of a matrix; see `device.base.Matrix`."""

    kind: str
    obstacle: str
    nbytes: int


@dataclass(slots=True)
class _Stack:
    """One tensor of this rank that several of the checkpoint fill, one below the other."""

    sections: Sections
    # What is read of each output; None: it is one number.
    inputs: Share | None
    # How many of these inputs stay when the matrix has been made.
    num_kept: int
    # What a matrix is given to when it is whole.
    receive: Callable[[Tensor], Held] | None
    num_missing: int
    # Of a matrix: why it is not asked to be of fewer bits.
    obstacle: str = ""
    # Of a matrix, made when its first part is read, in the type the device wants it in.
    whole: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        rows = sum(self.num_rows(name) for name in self.sections)
        return (rows,) if self.inputs is None else (rows, self.inputs.count)

    @property
    def is_filled_up(self) -> bool:
        """Whether some of this rank's part are zeros."""
        shares = [share for shares in self.sections.values() for share in shares]
        return any(share.is_filled_up for share in [*shares, self.inputs or whole(1)])

    def num_rows(self, name: str) -> int:
        """How many of this rank's rows a tensor of the checkpoint fills."""
        return sum(share.count for share in self.sections[name])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor of the checkpoint."""
        rows = sum(share.total for share in self.sections[name])
        return (rows,) if self.inputs is None else (rows, self.inputs.total)


@dataclass(slots=True)
class Read:
    """Bytes of the checkpoint: what this rank took, and what the tensors that it has a part of
    hold."""

    taken: int = 0
    total: int = 0


class Parameters:
    """Owns, until loading is done, the tensors a model is made of, by checkpoint name.

    Layers ask for tensors while they are built. Vectors lie where they will stay; a matrix is put
    together when its first part is read, and is given to its layer with the last.
    """

    def __init__(self, device: Device, quantize: str | None = None) -> None:
        """`quantize` is int8, int4 or fp8: how layers are to hold their matrices; None: floats."""
        self.device = device
        self.quantize = quantize
        self.nbytes = 0
        self.read = Read()
        self._stacks: dict[str, _Stack] = {}
        self._ignored: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._obstacles: list[str] = []
        self._after_load: list[Callable[[], None]] = []

    def add(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialized tensor that the checkpoint's tensor `name` will fill."""
        rows, *inputs = shape
        return self._add_tensor({name: [whole(rows)]}, whole(*inputs) if inputs else None)

    def add_bias(self, sections: Sections) -> Tensor:
        """This rank's part of the bias of a matrix with these sections."""
        return self._add_tensor(sections, None)

    def _add_tensor(self, sections: Sections, inputs: Share | None) -> Tensor:
        stack = _Stack(sections, inputs, inputs.count if inputs else 1, None, len(sections))
        stack.whole = self._make(stack, self.device.dtype)
        self.nbytes += stack.whole.nbytes
        self._stacks.update(dict.fromkeys(sections, stack))
        return stack.whole

    def add_matrix(
        self,
        sections: Sections,
        inputs: Share,
        receive: Callable[[Tensor], Held],
        reads_whole_rows: bool = False,
        obstacle: str = "",
    ) -> None:
        """Have this rank's part of the named matrices, one below the other, given to `receive` once
        they are read; with `reads_whole_rows` all of their inputs, of which `receive` keeps its
        own. obstacle: why the matrix is not asked to be of fewer bits; it is logged.

        The tensor has the type that the device puts matrices together in, and nothing here keeps
        it: what `receive` returns is what is left of it.
        """
        read = inputs
        if reads_whole_rows:
            read = Share(inputs.total, 0, max(inputs.total, inputs.start + inputs.count))
        stack = _Stack(sections, read, inputs.count, receive, len(sections), obstacle)
        self._stacks.update(dict.fromkeys(sections, stack))

    def _make(self, stack: _Stack, dtype: torch.dtype) -> Tensor:
        make = torch.zeros if stack.is_filled_up else torch.empty
        return make(stack.shape, dtype=dtype, device=self.device.torch_device)

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
        taken, there = self.read.taken / 1e9, self.read.total / 1e9
        logger.info("read %.3f of %.3f GB of weights", taken, there)
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
        numbers = sum(stack.shape[0] * stack.num_kept for stack in matrices)
        return self.nbytes + numbers * bits // 8

    def _fill(self, name: str, tensor: Tensor, path: Path, copies: WeightCopies) -> None:
        stack = self._stacks[name]
        shape = stack.shape_of(name)
        if shape != tensor.shape:
            raise ModelError(
                f"{name} in {path.name} has the shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}; config.json and weights are not of the same model"
            )
        if stack.whole is None:
            stack.whole = self._make(stack, copies.matrix_dtype or tensor.dtype)
        first = 0
        for other in stack.sections:
            if other == name:
                break
            first += stack.num_rows(other)
        self.read.total += tensor.nbytes
        for target, source in self._own_parts(stack, name, stack.whole[first:], tensor):
            self.read.taken += source.nbytes
            copies.copy(target, source)
        stack.num_missing -= 1
        if stack.receive is not None and not stack.num_missing:
            found, stack.whole = stack.whole, None
            copies.then(partial(self._give, name, stack, found))

    def _own_parts(
        self, stack: _Stack, name: str, target: Tensor, tensor: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What this rank has of a tensor of the checkpoint, and where it goes, from the first row
        of `target` on. Of the tensor nothing else is read."""
        first, offset = 0, 0
        for share in stack.sections[name]:
            rows = tensor[offset + share.start :][: share.num_real]
            place = target[first:][: share.num_real]
            if stack.inputs is not None and not stack.inputs.is_whole:
                rows = rows[:, stack.inputs.start :][:, : stack.inputs.num_real]
                place = place[:, : stack.inputs.num_real]
            if rows.numel():
                yield place, rows
            first, offset = first + share.count, offset + share.total

    def _give(self, name: str, stack: _Stack, found: Tensor) -> None:
        assert stack.receive is not None, "only matrices are given away"
        held = stack.receive(found)
        self.nbytes += held.nbytes
        self._kinds[held.kind] += 1
        if obstacle := held.obstacle or stack.obstacle:
            self._obstacles.append(f"{name} is {held.kind} ({obstacle})")

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
    memory is the file's pages. ModelError if the file is not readable.

    Names may lack `model.`: so they are where a model was saved without its head.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                full_name = f"model.{name}"
                if name not in wanted and full_name in wanted:
                    yield full_name, file.get_tensor(name)
                else:
                    yield name, file.get_tensor(name) if name in wanted else None
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable safetensors file ({error}); download it again"
        ) from error


def is_headless(directory: Path) -> bool:
    """Whether the checkpoint was saved without the head that makes scores, as those for embeddings
    are; ModelError if a file is not readable."""
    names = {name for path in _weight_files(directory) for name, _ in _tensors(path, ())}
    return "embed_tokens.weight" in names and "lm_head.weight" not in names


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
