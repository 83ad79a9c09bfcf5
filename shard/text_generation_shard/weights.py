"""Safetensors files into the tensors a model asked for, one tensor at a time."""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_shard import pickles
from text_generation_shard.device.cpu import cgroup
from text_generation_shard.errors import ModelError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Held:
    """What became of a matrix."""

    # int4, int8 or the name of a dtype.
    kind: str
    nbytes: int
    # Why it is not held as asked; empty: it is.
    obstacle: str = ""


@dataclass(slots=True)
class _Stack:
    """A matrix of several tensors of the checkpoint, while not all have been read."""

    first_rows: Mapping[str, int]
    shape: tuple[int, ...]
    receive: Callable[[Tensor], Held]
    num_missing: int
    whole: Tensor | None = None


class Parameters:
    """Owns, until loading is done, the tensors a model is made of, by checkpoint name.

    Layers ask for tensors while they are built. Vectors lie where they will stay; a matrix is put
    together when its first part is read, and is given to its layer with the last.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantize: str | None = None
    ) -> None:
        """`quantize` is int8 or int4: how layers are to hold their matrices; None: as `dtype`."""
        if quantize is not None and device.type != "cpu":
            raise ModelError(
                f"--quantize {quantize} runs on the CPU only; leave it out, or use --device cpu"
            )
        self.dtype = dtype
        self.device = device
        self.quantize = quantize
        self.nbytes = 0
        self._slots: dict[str, Tensor] = {}
        self._stacks: dict[str, _Stack] = {}
        self._ignored: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._obstacles: list[str] = []
        self._after_load: list[Callable[[], None]] = []

    def add(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor that the checkpoint's tensor `name` will fill."""
        return self.add_stacked({name: shape})

    def add_stacked(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """One tensor whose rows are, one after another, the named tensors of the checkpoint."""
        rows = sum(shape[0] for shape in shapes.values())
        tail = next(iter(shapes.values()))[1:]
        whole = torch.empty(rows, *tail, dtype=self.dtype, device=self.device)
        self.nbytes += whole.nbytes
        start = 0
        for name, shape in shapes.items():
            self._slots[name] = whole[start : start + shape[0]]
            start += shape[0]
        return whole

    def add_matrix(
        self, outputs: Mapping[str, int], in_features: int, receive: Callable[[Tensor], Held]
    ) -> None:
        """Have the named matrices, one below the other, given to `receive` once they are read.

        The tensor has the checkpoint's own type, so that quantising rounds once, and nothing here
        keeps it: what `receive` returns is what is left of it.
        """
        first_rows, rows = {}, 0
        for name, count in outputs.items():
            first_rows[name] = rows
            rows += count
        stack = _Stack(first_rows, (rows, in_features), receive, len(outputs))
        self._stacks.update(dict.fromkeys(outputs, stack))
        for name, count in outputs.items():
            # Shape without memory: what `_fill` compares with.
            self._slots[name] = torch.empty(count, in_features, device="meta")

    def ignore(self, name: str) -> None:
        """The checkpoint may hold `name`; it is not read."""
        self._ignored.add(name)

    def after_load(self, action: Callable[[], None]) -> None:
        """Run `action` when every tensor is filled."""
        self._after_load.append(action)

    def load(self, directory: Path) -> None:
        """Fill every tensor from *.safetensors; ModelError names what is missing or unexpected."""
        files = _weight_files(directory)
        self._check_room()
        total, done, spoke = len(self._slots), 0, time.monotonic()
        missing = set(self._slots)
        unexpected: list[str] = []
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        if name in missing:
                            self._fill(name, file.get_tensor(name), path)
                            missing.discard(name)
                            done += 1
                        elif not self._is_ignored(name):
                            unexpected.append(name)
                        if time.monotonic() - spoke > 2:
                            spoke = time.monotonic()
                            logger.info("loading weights: %d of %d tensors", done, total)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is not a readable safetensors file ({error}); download it again"
                ) from error
        if missing or unexpected:
            raise ModelError(_mismatch(directory, sorted(missing), sorted(unexpected)))
        logger.info("loading weights: %d of %d tensors", done, total)
        self._slots.clear()
        self._stacks.clear()
        for action in self._after_load:
            action()
        self._after_load.clear()
        if self.quantize is not None:
            self._log_quantised()

    def _check_room(self) -> None:
        """ModelError if the weights alone are more than this process's control group has left: the
        kernel would kill it while they are read, without a word."""
        group = cgroup.memory_limit() if self.device.type == "cpu" else None
        needed = self._least_bytes()
        if group is not None and needed > group.free:
            kind = self.quantize or str(self.dtype).removeprefix("torch.")
            smaller = "" if kind == "int4" else ", choose a smaller --dtype or --quantize"
            raise ModelError(
                f"the weights take {needed / 1e9:.2f} GB in {kind}, and of the memory limit of "
                f"{group.limit / 1e9:.2f} GB that this process runs under (a container's --memory) "
                f"{group.free / 1e9:.2f} GB are left: raise the limit{smaller}, or serve a smaller "
                "model"
            )

    def _least_bytes(self) -> int:
        """What the tensors take once they are loaded; scales of quantised ones are left out."""
        # A matrix that can not be quantised as asked is larger.
        bits = {"int8": 8, "int4": 4}.get(self.quantize or "", self.dtype.itemsize * 8)
        matrices = {id(stack): stack for stack in self._stacks.values()}.values()
        return self.nbytes + sum(math.prod(stack.shape) for stack in matrices) * bits // 8

    def _fill(self, name: str, tensor: Tensor, path: Path) -> None:
        slot = self._slots[name]
        if slot.shape != tensor.shape:
            raise ModelError(
                f"{name} in {path.name} has the shape {list(tensor.shape)}, config.json asks for "
                f"{list(slot.shape)}; config.json and weights are not of the same model"
            )
        stack = self._stacks.get(name)
        if stack is None:
            slot.copy_(tensor)
        else:
            self._add_part(stack, name, tensor)

    def _add_part(self, stack: _Stack, name: str, tensor: Tensor) -> None:
        if stack.whole is None:
            stack.whole = torch.empty(stack.shape, dtype=tensor.dtype, device=self.device)
        start = stack.first_rows[name]
        stack.whole[start : start + tensor.shape[0]] = tensor
        stack.num_missing -= 1
        if not stack.num_missing:
            whole, stack.whole = stack.whole, None
            held = stack.receive(whole)
            self.nbytes += held.nbytes
            self._kinds[held.kind] += 1
            if held.obstacle:
                self._obstacles.append(f"{name} is {held.kind} ({held.obstacle})")

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
