"""Loads safetensors files into a model's tensors, one after another."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_shard.checkpoint.files import are_pickled, existing, some, weight_names
from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.device.base import EmbeddingTable, Matrix, WeightCopies
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

# Rows of two matrices that are compared at once.
_COMPARED_ROWS = 4096


Sections = Mapping[str, Sequence[Share]]
"""By name of a tensor of the checkpoint: this rank's share of each projection in it."""


Receive = Callable[[Tensor], Matrix | EmbeddingTable]
"""Receives a complete matrix, and returns what is kept of it."""


@dataclass(slots=True)
class Stack:
    """One tensor of this rank, stacked from several of the checkpoint."""

    sections: Sections
    # The inputs that are read; None: a vector.
    inputs: Share | None
    # The number of inputs kept after loading.
    num_kept: int
    # Receives a complete matrix; None: a tensor allocated in advance.
    receive: Receive | None
    # Why a matrix is not quantized; empty: no reason.
    obstacle: str = ""
    # Allocated in advance; None: a matrix, which is allocated when it is read.
    whole: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        rows = sum(share.count for shares in self.sections.values() for share in shares)
        return (rows,) if self.inputs is None else (rows, self.inputs.count)

    @property
    def is_filled_up(self) -> bool:
        """Whether this rank's part contains padding."""
        shares = [share for shares in self.sections.values() for share in shares]
        return any(share.is_filled_up for share in [*shares, self.inputs or whole(1)])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor of the checkpoint."""
        rows = sum(share.total for share in self.sections[name])
        return (rows,) if self.inputs is None else (rows, self.inputs.total)


class Parameters:
    """Owns a model's tensors until loading is done.

    Layers register their tensors when they are built. Vectors are allocated at once; a matrix is
    allocated when it is read, and is then passed to its layer.
    """

    def __init__(self, device: Device, quantize: str | None = None) -> None:
        """`quantize`: int8, int4 or fp8, the form of matrices; None: floats."""
        self.device = device
        self.quantize = quantize
        self.nbytes = 0
        self._stacks: list[Stack] = []
        self._ignored: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._obstacles: list[str] = []
        self._after_load: list[Callable[[], None]] = []

    def add_vector(self, sections: Sections) -> Tensor:
        """This rank's part of a norm or bias with these sections, to be filled."""
        stack = Stack(sections, inputs=None, num_kept=1, receive=None)
        stack.whole = self._make(stack, self.device.dtype)
        self.nbytes += stack.whole.nbytes
        self._stacks.append(stack)
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
        self._stacks.append(Stack(sections, read, inputs.count, receive, obstacle))

    def _make(self, stack: Stack, dtype: torch.dtype) -> Tensor:
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
        matrices = [stack for stack in self._stacks if stack.receive is not None]
        num_numbers = sum(stack.shape[0] * stack.num_kept for stack in matrices)
        check_room(self.device, self.quantize, num_numbers, self.nbytes)
        names = {name for stack in self._stacks for name in stack.sections}
        tensors = open_tensors(directory, names)
        missing = sorted(names - tensors.keys())
        unexpected = sorted(name for name in tensors.keys() - names if not self._ignores(name))
        if missing or unexpected:
            raise ModelError(mismatch(directory, missing, unexpected))
        done, spoke = 0, time.monotonic()
        with self.device.weight_copies() as copies:
            for stack in self._stacks:
                self._fill(stack, tensors, copies)
                done += len(stack.sections)
                if time.monotonic() - spoke > 2:
                    spoke = time.monotonic()
                    logger.info("loading weights: %d of %d tensors", done, len(names))
        logger.info("loading weights: %d of %d tensors", done, len(names))
        self._stacks.clear()
        for action in self._after_load:
            action()
        self._after_load.clear()
        if self.quantize is not None:
            self._log_quantised()

    def _fill(
        self, stack: Stack, tensors: Mapping[str, "StoredTensor"], copies: WeightCopies
    ) -> None:
        first, target = 0, stack.whole
        for name, shares in stack.sections.items():
            tensor, shape = tensors[name].read(), stack.shape_of(name)
            if shape != tensor.shape:
                raise ModelError(
                    f"{name} in {tensors[name].path.name} has the shape {list(tensor.shape)}, "
                    f"config.json asks for {list(shape)}; config.json and weights are not of the "
                    "same model"
                )
            if target is None:
                target = self._make(stack, copies.matrix_dtype or tensor.dtype)
            for place, source in self._own_parts(stack, shares, target[first:], tensor):
                copies.copy(place, source)
            first += sum(share.count for share in shares)
        if stack.receive is not None:
            assert target is not None, "a matrix has a section"
            copies.then(partial(self._give, stack, target))

    def _own_parts(
        self, stack: Stack, shares: Sequence[Share], target: Tensor, tensor: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(destination in `target`, source in `tensor`) of this rank's parts. Nothing else of the
        tensor is read."""
        first, offset = 0, 0
        for share in shares:
            rows = tensor[offset + share.start :][: share.num_real]
            place = target[first:][: share.num_real]
            if stack.inputs is not None and not stack.inputs.is_whole:
                rows = rows[:, stack.inputs.start :][:, : stack.inputs.num_real]
                place = place[:, : stack.inputs.num_real]
            if rows.numel():
                yield place, rows
            first, offset = first + share.count, offset + share.total

    def _give(self, stack: Stack, found: Tensor) -> None:
        assert stack.receive is not None, "only matrices have a receiver"
        held = stack.receive(found)
        self.nbytes += held.nbytes
        self._kinds[held.kind] += 1
        if stack.obstacle:
            *_, name = stack.sections
            self._obstacles.append(f"{name} is {held.kind} ({stack.obstacle})")

    def _log_quantised(self) -> None:
        counts = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        logger.info("quantized weights: %.1f MB, matrices: %s", self.nbytes / 1e6, counts)
        if self._obstacles:
            others = len(self._obstacles) - 1
            more = f", and so are {others} more" if others else ""
            logger.info("not %s: %s%s", self.quantize, self._obstacles[0], more)

    def _ignores(self, name: str) -> bool:
        # Old checkpoints contain rotary frequencies, which are computed here instead.
        return name in self._ignored or name.endswith("rotary_emb.inv_freq")


def check_room(device: Device, quantize: str | None, num_numbers: int, nbytes: int = 0) -> None:
    """ModelError if matrices of so many numbers, beside `nbytes` of vectors, do not fit even
    without scales, and if every matrix could be quantized as requested."""
    bits = {"int8": 8, "int4": 4, "fp8": 8}.get(quantize or "", device.dtype.itemsize * 8)
    kind = quantize or str(device.dtype).removeprefix("torch.")
    device.check_room(nbytes + num_numbers * bits // 8, kind)


def weight_files(directory: Path) -> list[Path]:
    names = weight_names(str(directory), existing(directory), directory)
    if are_pickled(names):
        raise ModelError(
            f"{directory} holds {names[0]}, which is a pickle; pickles are not read while "
            f"serving: run `text-generation-server download-weights {directory}` once, which "
            "converts it to safetensors without running its code"
        )
    return [directory / name for name in names]


class StoredTensor(NamedTuple):
    """A tensor in an open file of the checkpoint."""

    path: Path
    file: Any
    name: str

    def read(self) -> Tensor:
        """The memory-mapped tensor; ModelError if the file is not readable."""
        with _readable(self.path):
            tensor: Tensor = self.file.get_tensor(self.name)
            return tensor


def open_tensors(directory: Path, wanted: Collection[str] = ()) -> dict[str, StoredTensor]:
    """All tensors by name; ModelError if a file is not readable.

    Adds `model.` to names if these are wanted: it is missing in models saved without their head.
    """
    names, found = {*wanted}, dict[str, StoredTensor]()
    for path in weight_files(directory):
        with _readable(path):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - not a mapping
                full_name = f"model.{name}"
                is_short = name not in names and full_name in names
                found[full_name if is_short else name] = StoredTensor(path, file, name)
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable safetensors file ({error}); download it again"
        ) from error


def has_tied_head(directory: Path, is_tied: bool) -> bool:
    """Whether the head of a checkpoint is its embeddings, if its configuration says `is_tied`;
    ModelError if a file is not readable."""
    names = "lm_head.weight", "model.embed_tokens.weight"
    tensors = open_tensors(directory, names)
    head, table = map(tensors.get, names)
    if head is None and table is not None and not is_tied and table.name != names[1]:
        logger.warning(
            "the checkpoint has no lm_head.weight: it is an embedding model, and text that it "
            "generates is meaningless"
        )
        return True
    if head is None or table is None or not is_tied:
        return is_tied
    parts = (torch.split(one.read(), _COMPARED_ROWS) for one in (head, table))
    pairs = zip_longest(*parts, fillvalue=torch.empty(0))
    is_copy = all(torch.equal(own.float(), other.float()) for own, other in pairs)
    if not is_copy:
        # As in transformers 5.
        logger.warning(
            "`tie_word_embeddings` is true, and lm_head.weight differs from the embeddings: it is "
            "used; set `tie_word_embeddings` to false in config.json"
        )
    return is_copy


def mismatch(directory: Path, missing: list[str], unexpected: list[str]) -> str:
    """Which tensors a checkpoint lacks, or has beside those of its configuration."""
    parts = [f"lack {some(missing)}"] if missing else []
    parts += [f"hold unexpected {some(unexpected)}"] if unexpected else []
    return (
        f"the weights in {directory} {' and '.join(parts)}; "
        "config.json and weights are not of the same model"
    )
