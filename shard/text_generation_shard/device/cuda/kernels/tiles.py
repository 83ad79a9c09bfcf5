"""Sizes of tiles by architecture: a static table, so that nothing is measured at a start."""

from typing import NamedTuple

import torch


class DecodeTile(NamedTuple):
    """How `decode` cuts the context of a row."""

    # Tokens of a program, whatever else is in the batch; and of one of its products.
    split: int
    tile: int
    num_warps: int
    num_stages: int


class PrefillTile(NamedTuple):
    """How `prefill` cuts queries and keys."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By compute capability: the last row that is not above a device's own serves it; 0 is the
# interpreter's. Chosen by what compiles without spills within the shared memory of a block (99 KiB
# on 8.9); not measured yet.
_DECODE = {0: DecodeTile(64, 64, 4, 2), 80: DecodeTile(512, 64, 4, 2)}
_PREFILL = {
    0: PrefillTile(32, 64, 4, 2),
    80: PrefillTile(128, 32, 8, 3),
    89: PrefillTile(128, 64, 8, 2),
}
# Where the cache has 8 bits: what was read takes registers beside what it becomes.
_PREFILL_FLOAT8 = {**_PREFILL, 89: _PREFILL[80], 90: _PREFILL[89]}
# Heads of more features than this get half of a tile.
_WIDE_HEAD = 128


def decode_tile(capability: int, head_dim: int) -> DecodeTile:
    """capability: 90 for 9.0."""
    own = _DECODE[max(least for least in _DECODE if least <= capability)]
    return own._replace(tile=own.tile // 2) if head_dim > _WIDE_HEAD else own


def prefill_tile(capability: int, head_dim: int, cache_dtype: torch.dtype) -> PrefillTile:
    """capability: see `decode_tile`."""
    table = _PREFILL_FLOAT8 if cache_dtype.itemsize == 1 else _PREFILL
    own = table[max(least for least in table if least <= capability)]
    if head_dim > _WIDE_HEAD:
        return own._replace(queries=own.queries // 2, keys=own.keys // 2)
    return own
