"""Splits a model among ranks. Pure functions.

All ranks have parts of the same size. Heads are never cut. Features of the feed-forward and tokens
of the vocabulary are padded with zeros at the end: zeros do not change a sum, and the scores of
padding are removed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from text_generation_shard.device.base import DecoderSizes
from text_generation_shard.device.reference.matrices import GROUP
from text_generation_shard.errors import ModelError

# The form of a weight [N, K] for a requested int8, int4 or fp8: one of these, or None for floats.
FormOf = Callable[[tuple[int, int], str | None], str | None]

# Features of the feed-forward that are not split: a vector of the kernels' outputs, and the unit of
# inputs of int8 and fp8.
_UNIT = 16
# Fixed parts of a sum over features: the same for every number of ranks that divides them.
_PARTS = 8
# Larger counts are not listed.
_MOST_SHARDS = 128


@dataclass(frozen=True, slots=True)
class Share:
    """The range of `count` items at `start`, of `total` items; items beyond `total` are zeros."""

    total: int
    start: int
    count: int

    @property
    def num_real(self) -> int:
        """Items without padding."""
        return max(0, min(self.count, self.total - self.start))

    @property
    def is_whole(self) -> bool:
        """Whether it is exactly all items."""
        return (self.start, self.count) == (0, self.total)

    @property
    def is_filled_up(self) -> bool:
        """Whether it contains padding."""
        return self.num_real < self.count

    def times(self, size: int) -> "Share":
        """The same range where each item consists of `size` smaller ones."""
        return Share(self.total * size, self.start * size, self.count * size)


def whole(total: int) -> Share:
    """All items."""
    return Share(total, 0, total)


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's part of a model."""

    heads: Share
    # With fewer KV heads than ranks, several ranks have the same one.
    kv_heads: Share
    # Inner features of the feed-forward.
    inner: Share
    vocabulary: Share
    # Inputs in each fixed part of the sums of o_proj and down_proj. The parts are the same for 1,
    # 2, 4 and 8 ranks, if the model can be split so; each rank has whole parts.
    attended_part: int
    inner_part: int


def partition_of(
    config: DecoderSizes,
    rank: int,
    size: int,
    quantize: str | None = None,
    form_of: FormOf = lambda shape, quantize: None,
    fills_up: bool = False,
) -> Partition:
    """The part of rank `rank` of `size`. ModelError, with the possible counts, if `size` is not
    one. fills_up: pad to whole fixed parts also with one rank."""
    splits = _Splits(config, quantize, form_of)
    if not splits.work_for(size):
        raise ModelError(splits.refusal(size))
    own_heads, own_rows = config.num_heads // size, -(-config.vocab_size // size)
    inner = splits.inner(rank, size)
    if size == 1 and not fills_up:
        inner = whole(config.intermediate_size)
    return Partition(
        heads=Share(config.num_heads, rank * own_heads, own_heads),
        kv_heads=Share(
            config.num_kv_heads,
            rank * config.num_kv_heads // size,
            max(1, config.num_kv_heads // size),
        ),
        inner=inner,
        vocabulary=Share(config.vocab_size, rank * own_rows, own_rows),
        attended_part=splits.attended_part,
        inner_part=splits.inner_part,
    )


class _Splits:
    """The numbers of ranks among which a model can be split, and its fixed parts."""

    def __init__(self, config: DecoderSizes, quantize: str | None, form_of: FormOf) -> None:
        self._config, self._quantize, self._form_of = config, quantize, form_of
        hidden, total = config.hidden_size, config.intermediate_size
        self._unit = GROUP if form_of((hidden, total), quantize) == "int4" else _UNIT
        self._num_units = -(-total // self._unit)
        self._num_parts = min(_PARTS, 1 << (self._num_units - 1).bit_length())
        self.inner_part = -(-self._num_units // self._num_parts) * self._unit
        # Of whole heads, and in int4 whole groups.
        attended, num_parts = config.num_heads * config.head_dim, _PARTS
        unit = GROUP if form_of((hidden, attended), quantize) == "int4" else 1
        while config.num_heads % num_parts or attended // num_parts % unit:
            num_parts //= 2
        self.attended_part = attended // num_parts

    def work_for(self, size: int) -> bool:
        """Whether the model can be split among so many ranks."""
        return self._divides_heads(size) and self._keeps_forms(size)

    def inner(self, rank: int, size: int) -> Share:
        """The rank's inner features."""
        own = -(-self._num_units // size) * self._unit
        if self._num_parts % size == 0:
            own = self.inner_part * self._num_parts // size
        return Share(self._config.intermediate_size, rank * own, own)

    def refusal(self, size: int) -> str:
        """Why it can not be split among so many ranks, and the numbers that work."""
        config = self._config
        working = filter(self.work_for, range(1, min(_MOST_SHARDS, config.num_heads) + 1))
        *counts, last = map(str, working)
        listed = f"{', '.join(counts)} or {last}" if counts else last
        heads = f"{config.num_heads} heads, {config.num_kv_heads} KV heads"
        if self._divides_heads(size):
            heads = (
                f"{config.num_heads} heads of {config.head_dim} features, of which a shard must "
                f"have whole groups in {self._quantize}"
            )
        return f"the model can not be split among {size} shards ({heads}): use {listed}"

    def _divides_heads(self, size: int) -> bool:
        """Whether heads and KV heads can be divided evenly."""
        num_kv_heads = self._config.num_kv_heads
        divides_kv_heads = num_kv_heads % size == 0 or size % num_kv_heads == 0
        return self._config.num_heads % size == 0 and divides_kv_heads

    def _keeps_forms(self, size: int) -> bool:
        """Whether each part has the form of the whole matrix: otherwise ranks would compute other
        results than one rank."""
        if self._quantize is None or size == 1:
            return True
        parts = self._products(size, self.inner(0, size).count)
        wholes = self._products(1, self._config.intermediate_size)
        forms = [self._form_of(shape, self._quantize) for shape in wholes]
        pairs = zip(parts, forms, strict=True)
        return all(self._form_of(part, form) == form for part, form in pairs)

    def _products(self, size: int, inner: int) -> tuple[tuple[int, int], ...]:
        """[N, K] of a rank's matrices of a layer: qkv, out, gate and up, down."""
        hidden, head_dim = self._config.hidden_size, self._config.head_dim
        attended = self._config.num_heads // size * head_dim
        qkv = attended + 2 * max(1, self._config.num_kv_heads // size) * head_dim
        return (qkv, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)
