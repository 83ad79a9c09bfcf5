"""Tile sizes by GPU architecture: a static table, so that no start tunes anything."""

from typing import NamedTuple

import torch


class DecodeTile(NamedTuple):
    """How `decode` splits the context of a row."""

    # Tokens per program, independent of the batch; tokens per product.
    split: int
    tile: int
    num_warps: int
    num_stages: int


class PrefillTile(NamedTuple):
    """How `prefill` tiles queries and keys."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class ProductTile(NamedTuple):
    """How `product` tiles rows, outputs and inputs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


INT4_BLOCK = 128
"""Inputs per block of an int4 weight, and so the `inputs` of its tiles."""

# By compute capability: the largest key not above the device's applies; 0 is for the interpreter.
# Chosen so that kernels compile without spills and within the shared memory of a block (99 KiB on
# 8.9), not by measurement.
_DECODE = {0: DecodeTile(64, 64, 4, 2), 80: DecodeTile(512, 64, 4, 2)}
_PREFILL = {
    0: PrefillTile(32, 64, 4, 2),
    80: PrefillTile(128, 32, 8, 3),
    89: PrefillTile(128, 64, 8, 2),
}
# For a float8 cache: the converted tile takes additional registers.
_PREFILL_FLOAT8 = {**_PREFILL, 89: _PREFILL[80], 90: _PREFILL[89]}
# Products, by bits per weight; the same for all GPUs, and not measured. `_FEW` serves as many rows
# as its tile has, `_SOME` up to 256 rows, and any number of rows if one tile must serve all.
# Float32 has one tile of 32 outputs: with 64, Triton 3.7 uses the tensor cores of compute
# capability 10.0, which drop bits.
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
# Heads with more features than this get half the tile.
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
    """bits: per weight; is_float32: hidden states are float32. num_rows None: the one tile for
    every number of rows."""
    if is_float32:
        return _FLOAT32[bits]
    if num_rows is None:
        return _SOME[bits]
    if num_rows <= _FEW[bits].rows:
        return _FEW[bits]
    return _SOME[bits] if num_rows <= _MOST_OF_SOME else _MANY[bits]
