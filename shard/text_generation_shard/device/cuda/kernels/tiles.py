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


class ProductTile(NamedTuple):
    """How `product` cuts rows, outputs and inputs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


INT4_BLOCK = 128
"""Inputs that lie together in a weight of 4 bits, and so the `inputs` of its tiles."""

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
# Of products, by the bits of a number of the weight; the same for all GPUs, and not measured yet.
# `_FEW` is for as many rows as its tile has, `_SOME` for 256, and also for any number of rows where
# these must not change the tile. Float32 has one for all, with 32 outputs: with 64, Triton 3.7
# gives it to the tensor cores of compute capability 10.0, which leave out bits.
_FEW = {8: ProductTile(16, 32, 256, 4, 4), 4: ProductTile(16, 32, INT4_BLOCK, 4, 6)}
_SOME = {
    16: ProductTile(64, 64, 64, 4, 5),
    8: ProductTile(64, 64, 64, 4, 5),
    4: ProductTile(64, 64, INT4_BLOCK, 4, 4),
}
_MOST_OF_SOME = 256
_MANY = {8: ProductTile(128, 128, 64, 8, 3), 4: ProductTile(128, 128, INT4_BLOCK, 8, 3)}
_FLOAT32 = {
    32: ProductTile(64, 32, 16, 4, 3),
    8: ProductTile(64, 32, 32, 4, 3),
    4: ProductTile(64, 32, INT4_BLOCK, 4, 2),
}
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


def product_tile(bits: int, is_float32: bool, num_rows: int | None) -> ProductTile:
    """bits: of a number of the weight; is_float32: hidden states are float32. num_rows None: the
    one tile that serves every number of rows."""
    if is_float32:
        return _FLOAT32[bits]
    if num_rows is None:
        return _SOME[bits]
    if num_rows <= _FEW[bits].rows:
        return _FEW[bits]
    return _SOME[bits] if num_rows <= _MOST_OF_SOME else _MANY[bits]
