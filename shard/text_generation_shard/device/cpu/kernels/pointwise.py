"""Pointwise kernels: norm, rotation, bias, scaling.

One pass over memory instead of several torch operators; arithmetic is float32, rounded once at the
end. A token's result depends only on that token.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from text_generation_shard.device.cpu.kernels import Address, Count, Real, llvm, vector
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, LANES
from text_generation_shard.device.cpu.kernels.thread_pool import compute
from text_generation_shard.device.cpu.kernels.vector import ADDRESS, FLOAT32

# Up to this number of values, starting another thread costs more than it saves.
_SMALL: Final = 8192


class Norm(NamedTuple):
    """Arguments of an RMS norm of rows."""

    kind: Any
    # [rows, size]: hidden states, changed in place; delta, added to them times `multiplier` (0:
    # none); normalized rows.
    hidden: Address
    delta: Address
    out: Address
    # [size] float32.
    weight: Address
    multiplier: Real
    eps: Real
    size: Count


def add_norm(
    hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
) -> Tensor:
    """hidden [T, size] += delta * multiplier, in place; returns its RMS norm times weight.

    weight [size] in float32; hidden and delta contiguous, of one type.
    """
    out = torch.empty_like(hidden)
    norm = Norm(
        kind=vector.marker(hidden.dtype),
        hidden=vector.tensor_address(hidden),
        delta=vector.tensor_address(delta, hidden.dtype),
        out=vector.tensor_address(out),
        weight=vector.tensor_address(weight, torch.float32),
        multiplier=np.float32(multiplier),
        eps=np.float32(eps),
        size=hidden.shape[1],
    )
    compute(normalize_row, norm, len(hidden), is_shared=hidden.numel() > _SMALL)
    return out


@vector.inlined
def _inverse_rms(kind: Any, numbers: Any, size: int, eps: Any) -> Any:
    total = np.float32(0.0)
    for index in range(size):
        value = llvm.widened(kind, numbers[index])
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)


@njit(nogil=True, cache=True, error_model="numpy")
def normalize_row(norm: Norm, row: int) -> None:
    """`add_norm` for one row, in vectors. Squares are summed lane by lane, in order."""
    kind = norm.kind
    whole = norm.size // LANES * LANES
    rest, offset = norm.size - whole, row * norm.size * llvm.itemsize(kind)
    total = llvm.filled(FLOATS, np.float32(0.0))
    for start in range(0, whole, LANES):
        total = _add_squares(kind, norm, total, offset, start, LANES)
    if rest:
        total = _add_squares(kind, norm, total, offset, whole, rest)
    mean = vector.sum_of_lanes(total) / np.float32(norm.size)
    factor = np.float32(1.0) / np.sqrt(mean + norm.eps)
    for start in range(0, whole, LANES):
        _scale(kind, norm, factor, offset, start, LANES)
    if rest:
        _scale(kind, norm, factor, offset, whole, rest)


@vector.inlined
def _add_squares(kind: Any, norm: Norm, total: Any, offset: int, start: int, count: int) -> Any:
    """Add the delta to up to 16 hidden states, and their squares to the total."""
    at = offset + start * llvm.itemsize(kind)
    value = vector.load_numbers(kind, norm.hidden + at, count)
    if norm.delta != 0:
        value = value + vector.load_numbers(kind, norm.delta + at, count) * norm.multiplier
        value = vector.store_numbers(kind, value, norm.hidden + at, count)
    return vector.fma(total, value, value)


@vector.inlined
def _scale(kind: Any, norm: Norm, factor: Any, offset: int, start: int, count: int) -> None:
    at = offset + start * llvm.itemsize(kind)
    value = vector.load_numbers(kind, norm.hidden + at, count) * factor
    value = value * vector.load_numbers(FLOAT32, norm.weight + start * 4, count)
    vector.store_numbers(kind, value, norm.out + at, count)


@njit(nogil=True, cache=True, error_model="numpy")
def add_bias(kind: Any, out: int, bias: int, size: int) -> None:
    """out [size] += bias [size], in place."""
    numbers, added = llvm.array_at(kind, out), llvm.array_at(kind, bias)
    for index in range(size):
        numbers[index] = llvm.rounded(
            kind, llvm.widened(kind, numbers[index]) + llvm.widened(kind, added[index])
        )


@njit(nogil=True, cache=True, error_model="numpy")
def scale_row(kind: Any, numbers: int, multiplier: Any, out: int, size: int) -> None:
    """out [size] = numbers [size] times a float32."""
    source, target = llvm.array_at(kind, numbers), llvm.array_at(kind, out)
    for index in range(size):
        target[index] = llvm.rounded(kind, llvm.widened(kind, source[index]) * multiplier)


@njit(nogil=True, cache=True, error_model="numpy")
def widen_row(kind: Any, numbers: int, out: int, size: int) -> None:
    """Convert numbers [size] to float32 out [size]."""
    narrow, wide = llvm.array_at(kind, numbers), llvm.array_at(FLOAT32, out)
    for index in range(size):
        wide[index] = llvm.widened(kind, narrow[index])


class Rotation(NamedTuple):
    """Arguments of the rotation of heads."""

    kind: Any
    # [rows, row_size], heads of `head_dim`; changed in place.
    heads: Address
    row_size: Count
    head_dim: Count
    # Heads of a row that are rotated; the first `num_scaled` of them are multiplied by `scale`.
    num_rotated: Count
    num_scaled: Count
    scale: Real
    # [positions, 2, half] float32: cosines and sines for pairs of features i and i + half; and the
    # position of each row, int64.
    angles: Address
    positions: Address
    half: Count
    # [head_dim] float32: weights of the norms of queries (the scaled heads) and keys before the
    # rotation; 0: none.
    query_norm: Address
    key_norm: Address
    eps: Real


def rotate_(
    heads: Tensor,
    num_rotated: int,
    num_scaled: int,
    scale: float,
    angles: Tensor,
    positions: Tensor,
) -> None:
    """Rotate the first `num_rotated` heads of [T, n, head_dim], contiguous, in place; the first
    `num_scaled` are also multiplied by `scale`.

    angles [*, 2, rotary_dim / 2] float32, indexed by `positions` [T]: see Rotation.
    """
    rows, count, size = heads.shape
    rotation = Rotation(
        kind=vector.marker(heads.dtype),
        heads=vector.tensor_address(heads),
        row_size=count * size,
        head_dim=size,
        num_rotated=num_rotated,
        num_scaled=num_scaled,
        scale=np.float32(scale),
        angles=vector.tensor_address(angles, torch.float32),
        positions=vector.tensor_address(positions, torch.int64),
        half=angles.shape[2],
        query_norm=0,
        key_norm=0,
        eps=np.float32(0.0),
    )
    compute(rotate_row, rotation, rows, is_shared=heads.numel() > _SMALL)


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_row(rotation: Rotation, row: int) -> None:
    """Rotate the heads of one row by the angles of its position."""
    kind, position = rotation.kind, llvm.array_at(ADDRESS, rotation.positions)[row]
    half, size = rotation.half, rotation.head_dim
    cosines = llvm.array_at(FLOAT32, rotation.angles + position * 2 * half * 4)
    sines = llvm.array_at(FLOAT32, rotation.angles + (position * 2 + 1) * half * 4)
    for head in range(rotation.num_rotated):
        start = row * rotation.row_size + head * size
        numbers = llvm.array_at(kind, rotation.heads + start * llvm.itemsize(kind))
        norm = rotation.query_norm if head < rotation.num_scaled else rotation.key_norm
        if norm != 0:
            inverse = _inverse_rms(kind, numbers, size, rotation.eps)
            weights = llvm.array_at(FLOAT32, norm)
            for feature in range(size):
                value = llvm.widened(kind, numbers[feature]) * inverse * weights[feature]
                numbers[feature] = llvm.rounded(kind, value)
        factor = rotation.scale if head < rotation.num_scaled else np.float32(1.0)
        for pair in range(half):
            left, right = (
                llvm.widened(kind, numbers[pair]),
                llvm.widened(kind, numbers[pair + half]),
            )
            cosine, sine = cosines[pair] * factor, sines[pair] * factor
            numbers[pair] = llvm.rounded(kind, left * cosine - right * sine)
            numbers[pair + half] = llvm.rounded(kind, right * cosine + left * sine)
        for feature in range(2 * half, size):
            numbers[feature] = llvm.rounded(kind, llvm.widened(kind, numbers[feature]) * factor)
