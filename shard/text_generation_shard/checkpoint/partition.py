"""Splits a model among ranks. Pure functions.

All ranks have parts of the same size. Heads are never cut. Features of the feed-forward and tokens
of the vocabulary are padded with zeros at the end: zeros do not change a sum, and the scores of
padding are removed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from text_generation_shard.device.decoder import DecoderSizes
from text_generation_shard.device.reference.quantized import GROUP
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


def all_floats(shape: tuple[int, int], quantize: str | None) -> str | None:
    """The FormOf of a model whose weights are not quantized."""
    return None


def partition_of(
    config: DecoderSizes,
    rank: int,
    size: int,
    quantize: str | None = None,
    form_of: FormOf = all_floats,
    fills_up: bool = False,
) -> Partition:
    """The part of rank `rank` of `size`. ModelError, with the possible counts, if `size` is not
    one. fills_up: pad to whole fixed parts also with one rank."""
    if not _divides_heads(config, size) or not _keeps_forms(config, size, quantize, form_of):
        raise ModelError(_refusal(config, size, quantize, form_of))
    own_heads, own_rows = config.num_heads // size, -(-config.vocab_size // size)
    inner, inner_part = _inner(config, rank, size, quantize, form_of, fills_up)
    return Partition(
        heads=Share(config.num_heads, rank * own_heads, own_heads),
        kv_heads=Share(
            config.num_kv_heads,
            rank * config.num_kv_heads // size,
            max(1, config.num_kv_heads // size),
        ),
        inner=inner,
        vocabulary=Share(config.vocab_size, rank * own_rows, own_rows),
        attended_part=_attended_part(config, quantize, form_of),
        inner_part=inner_part,
    )


def working_counts(
    config: DecoderSizes, quantize: str | None = None, form_of: FormOf = all_floats
) -> list[int]:
    """The numbers of ranks among which the model can be split, up to 128."""
    return [
        size
        for size in range(1, min(_MOST_SHARDS, config.num_heads) + 1)
        if _divides_heads(config, size) and _keeps_forms(config, size, quantize, form_of)
    ]


def _divides_heads(config: DecoderSizes, size: int) -> bool:
    """Whether heads and KV heads can be divided evenly."""
    divides_kv_heads = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return config.num_heads % size == 0 and divides_kv_heads


def _keeps_forms(config: DecoderSizes, size: int, quantize: str | None, form_of: FormOf) -> bool:
    """Whether each part has the form of the whole matrix: otherwise ranks would compute other
    results than one rank."""
    if quantize is None or size == 1:
        return True
    inner, _ = _inner(config, 0, size, quantize, form_of)
    kv_heads = max(1, config.num_kv_heads // size)
    wholes = _products(config, config.num_heads, config.num_kv_heads, config.intermediate_size)
    parts = _products(config, config.num_heads // size, kv_heads, inner.count)
    forms = [form_of(shape, quantize) for shape in wholes]
    return all(form_of(part, form) == form for part, form in zip(parts, forms, strict=True))


def _products(
    config: DecoderSizes, num_heads: int, num_kv_heads: int, inner: int
) -> tuple[tuple[int, int], ...]:
    """[N, K] of a layer's matrices with these sizes: qkv, out, gate and up, down."""
    hidden, attended = config.hidden_size, num_heads * config.head_dim
    qkv = attended + 2 * num_kv_heads * config.head_dim
    return (qkv, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)


def _inner(
    config: DecoderSizes,
    rank: int,
    size: int,
    quantize: str | None,
    form_of: FormOf,
    fills_up: bool = False,
) -> tuple[Share, int]:
    """The rank's inner features, and the size of a fixed part."""
    total = config.intermediate_size
    unit = GROUP if form_of((config.hidden_size, total), quantize) == "int4" else _UNIT
    num_units = -(-total // unit)
    num_parts = min(_PARTS, 1 << (num_units - 1).bit_length())
    part = -(-num_units // num_parts)
    if size == 1 and not fills_up:
        return whole(total), part * unit
    own = part * num_parts // size if num_parts % size == 0 else -(-num_units // size)
    return Share(total, rank * own * unit, own * unit), part * unit


def _attended_part(config: DecoderSizes, quantize: str | None, form_of: FormOf) -> int:
    """The inputs of o_proj in a fixed part: of whole heads, and in int4 whole groups."""
    total = config.num_heads * config.head_dim
    unit = GROUP if form_of((config.hidden_size, total), quantize) == "int4" else 1
    num_parts = _PARTS
    while config.num_heads % num_parts or total // num_parts % unit:
        num_parts //= 2
    return total // num_parts


def _refusal(config: DecoderSizes, size: int, quantize: str | None, form_of: FormOf) -> str:
    *counts, last = (str(count) for count in working_counts(config, quantize, form_of))
    listed = f"{', '.join(counts)} or {last}" if counts else last
    heads = f"{config.num_heads} heads, {config.num_kv_heads} KV heads"
    if _divides_heads(config, size):
        heads = (
            f"{config.num_heads} heads of {config.head_dim} features, of which a shard must have "
            f"whole groups in {quantize}"
        )
    return f"the model can not be split among {size} shards ({heads}): use {listed}"
