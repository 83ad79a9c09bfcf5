"""Loads safetensors files into a model's tensors, one after another."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_shard.checkpoint.files import are_pickled, existing, weight_names
from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.device.base import Device, EmbeddingTable, Matrix, WeightCopies
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

# Rows of two matrices that are compared at once.
_COMPARED_ROWS = 4096


Sections = Mapping[str, Sequence[Share]]
"""By name of a tensor of the checkpoint: this rank's share of each projection in it."""


Receive = Callable[[Tensor], Matrix | EmbeddingTable]
"""Receives a complete matrix, and returns what is kept of it."""


@dataclass(slots=True)
class _Stack:
    """One tensor of this rank, stacked from several of the checkpoint."""

    sections: Sections
    # The inputs that are read; None: a vector.
    inputs: Share | None
    # The number of inputs kept after loading.
    num_kept: int
    # Receives a complete matrix; None: a tensor allocated in advance.
    receive: Receive | None
    num_missing: int
    # Why a matrix is not quantized; empty: no reason.
    obstacle: str = ""
    # A matrix is allocated when its first part is read.
    whole: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        rows = sum(self.num_rows(name) for name in self.sections)
        return (rows,) if self.inputs is None else (rows, self.inputs.count)

    @property
    def is_filled_up(self) -> bool:
        """Whether this rank's part contains padding."""
        shares = [share for shares in self.sections.values() for share in shares]
        return any(share.is_filled_up for share in [*shares, self.inputs or whole(1)])

    def num_rows(self, name: str) -> int:
        """This rank's rows from a tensor of the checkpoint."""
        return sum(share.count for share in self.sections[name])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor of the checkpoint."""
        rows = sum(share.total for share in self.sections[name])
        return (rows,) if self.inputs is None else (rows, self.inputs.total)


class Parameters:
    """Owns a model's tensors, by checkpoint name, until loading is done.

    Layers register their tensors when they are built. Vectors are allocated at once; a matrix is
    allocated when its first part is read, and is passed to its layer after the last part.
    """

    def __init__(self, device: Device, quantize: str | None = None) -> None:
        """`quantize`: int8, int4 or fp8, the form of matrices; None: floats."""
        self.device = device
        self.quantize = quantize
        self.nbytes = 0
        self._stacks: dict[str, _Stack] = {}
        self._ignored: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._obstacles: list[str] = []
        self._after_load: list[Callable[[], None]] = []

    def add(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is filled from the checkpoint's tensor `name`."""
        rows, *inputs = shape
        return self._add_tensor({name: [whole(rows)]}, whole(*inputs) if inputs else None)

    def add_bias(self, sections: Sections) -> Tensor:
        """This rank's part of a bias with these sections."""
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
        receive: Receive,
        reads_whole_rows: bool = False,
        obstacle: str = "",
    ) -> None:
        """Register this rank's part of the named matrices, which are stacked and passed to
        `receive`. With `reads_whole_rows` it gets all inputs, and keeps its own. obstacle: why the
        matrix is not quantized; it is logged.

        The tensor has the device's type for loading, and is not kept here.
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
        """Ignore the tensor `name` if the checkpoint has it."""
        self._ignored.add(name)

    def after_load(self, action: Callable[[], None]) -> None:
        """Run `action` after all tensors are loaded."""
        self._after_load.append(action)

    def load(self, directory: Path) -> None:
        """Fill every tensor from *.safetensors; ModelError names what is missing or unexpected."""
        files = weight_files(directory)
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
        """A lower bound of the bytes of the loaded tensors: without scales, and as if every matrix
        could be quantized as requested."""
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
        for target, source in self._own_parts(stack, name, stack.whole[first:], tensor):
            copies.copy(target, source)
        stack.num_missing -= 1
        if stack.receive is not None and not stack.num_missing:
            found, stack.whole = stack.whole, None
            copies.then(partial(self._give, name, stack, found))

    def _own_parts(
        self, stack: _Stack, name: str, target: Tensor, tensor: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(destination in `target`, source in `tensor`) of this rank's parts. Nothing else of the
        tensor is read."""
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
        assert stack.receive is not None, "only matrices have a receiver"
        held = stack.receive(found)
        self.nbytes += held.nbytes
        self._kinds[held.kind] += 1
        if stack.obstacle:
            self._obstacles.append(f"{name} is {held.kind} ({stack.obstacle})")

    def _log_quantised(self) -> None:
        counts = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        logger.info("quantized weights: %.1f MB, matrices: %s", self.nbytes / 1e6, counts)
        if self._obstacles:
            others = len(self._obstacles) - 1
            more = f", and so are {others} more" if others else ""
            logger.info("not %s: %s%s", self.quantize, self._obstacles[0], more)

    def _is_ignored(self, name: str) -> bool:
        # Old checkpoints contain rotary frequencies, which are computed here instead.
        return name in self._ignored or name.endswith("rotary_emb.inv_freq")


def weight_files(directory: Path) -> list[Path]:
    names = weight_names(str(directory), existing(directory), directory)
    if are_pickled(names):
        raise ModelError(
            f"{directory} holds {names[0]}, which is a pickle; pickles are not read while "
            f"serving: run `text-generation-server download-weights {directory}` once, which "
            "converts it to safetensors without running its code"
        )
    return [directory / name for name in names]


def _tensors(path: Path, wanted: Container[str]) -> Iterator[tuple[str, Tensor | None]]:
    """The names in a file with their memory-mapped tensors, or None if not wanted. ModelError if
    the file is not readable.

    Adds `model.` to names if needed: it is missing in models saved without their head.
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


def tensor_names(directory: Path) -> set[str]:
    """The names of all tensors; ModelError if a file is not readable."""
    return {name for path in weight_files(directory) for name, _ in _tensors(path, ())}


def is_headless(directory: Path) -> bool:
    """Whether the checkpoint has no head, like those of embedding models; ModelError if a file is
    not readable."""
    names = tensor_names(directory)
    return "embed_tokens.weight" in names and "lm_head.weight" not in names


def has_own_head(directory: Path) -> bool:
    """Whether the checkpoint has a head that differs from its embeddings; ModelError if a file is
    not readable."""
    names = "lm_head.weight", "model.embed_tokens.weight"
    found = {
        name: torch.split(tensor, _COMPARED_ROWS)
        for path in weight_files(directory)
        for name, tensor in _tensors(path, names)
        if tensor is not None
    }
    if len(found) < len(names):
        return False
    pairs = zip_longest(*found.values(), fillvalue=torch.empty(0))
    return not all(torch.equal(own.float(), other.float()) for own, other in pairs)


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
