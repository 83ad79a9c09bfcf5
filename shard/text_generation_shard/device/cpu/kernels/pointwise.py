"""What happens to each number by itself, or within one token: norm, rotation, activation.

One pass over memory for what torch does in three to six operators; arithmetic in float32, rounded
once at the end. A token's result depends on that token alone.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from text_generation_shard.device.cpu.kernels.norm import normalize_row
from text_generation_shard.device.cpu.kernels.vector import (
    ADDRESS,
    FLOAT32,
    array_at,
    itemsize,
    marker,
    rounded,
    widened,
)

# Below this many numbers starting another thread costs more than it saves (about 2 us).
_SMALL: Final = 8192
# May be added in any order: what is summed is split over the lanes of a vector.
_REORDER: Final = {"reassoc", "contract", "nsz", "arcp"}


def add_norm(
    hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float
) -> Tensor:
    """hidden [T, size] += delta * multiplier, in place; returns its RMS norm times weight.

    weight [size] in float32; hidden and delta contiguous, of one type.
    """
    out = torch.empty_like(hidden)
    rows, size = hidden.shape
    normalize(
        marker(hidden.dtype),
        hidden.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        np.float32(multiplier),
        weight.data_ptr(),
        np.float32(eps),
        out.data_ptr(),
        rows,
        size,
    )
    return out


@njit(inline="always", fastmath=_REORDER)
def _inverse_rms(kind: Any, numbers: Any, size: int, eps: Any) -> Any:
    total = np.float32(0.0)
    for place in range(size):
        value = widened(kind, numbers[place])
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)


@njit(nogil=True, cache=True, error_model="numpy")
def normalize_row_of(
    kind: Any,
    hidden: int,
    delta: int,
    multiplier: Any,
    weight: int,
    eps: Any,
    out: int,
    row: int,
    size: int,
) -> None:
    """`normalize` for one row of several."""
    offset = row * size * itemsize(kind)
    numbers, added, target = hidden + offset, delta + offset, out + offset
    if delta != 0:
        normalize_row(kind, 1, numbers, added, multiplier, weight, eps, target, size)
    else:
        normalize_row(kind, 0, numbers, added, multiplier, weight, eps, target, size)


@njit(nogil=True, cache=True, error_model="numpy")
def _normalize_few(
    kind: Any,
    hidden: int,
    delta: int,
    multiplier: Any,
    weight: int,
    eps: Any,
    out: int,
    rows: int,
    size: int,
) -> None:
    for row in range(rows):
        normalize_row_of(kind, hidden, delta, multiplier, weight, eps, out, row, size)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _normalize_many(
    kind: Any,
    hidden: int,
    delta: int,
    multiplier: Any,
    weight: int,
    eps: Any,
    out: int,
    rows: int,
    size: int,
) -> None:
    for row in prange(rows):
        normalize_row_of(kind, hidden, delta, multiplier, weight, eps, out, row, size)


@njit(nogil=True, cache=True, error_model="numpy")
def normalize(
    kind: Any,
    hidden: int,
    delta: int,
    multiplier: Any,
    weight: int,
    eps: Any,
    out: int,
    rows: int,
    size: int,
) -> None:
    """`add_norm` by addresses; delta: 0 for none."""
    if rows * size > _SMALL:
        _normalize_many(kind, hidden, delta, multiplier, weight, eps, out, rows, size)
    else:
        _normalize_few(kind, hidden, delta, multiplier, weight, eps, out, rows, size)


@njit(nogil=True, cache=True, error_model="numpy")
def add_bias(kind: Any, out: int, bias: int, rows: int, size: int) -> None:
    """out [rows, size] += bias [size], in place."""
    added = array_at(kind, bias)
    for row in range(rows):
        numbers = array_at(kind, out + row * size * itemsize(kind))
        for place in range(size):
            total = widened(kind, numbers[place]) + widened(kind, added[place])
            numbers[place] = rounded(kind, total)


@njit(nogil=True, cache=True, error_model="numpy")
def embed_row(
    kind: Any, vectors: int, token_id: int, out: int, row: int, size: int, multiplier: Any
) -> None:
    """A row of out [*, size] becomes a token's vector, of those [vocab_size, size], times
    multiplier."""
    numbers = array_at(kind, vectors + token_id * size * itemsize(kind))
    target = array_at(kind, out + row * size * itemsize(kind))
    for place in range(size):
        target[place] = rounded(kind, widened(kind, numbers[place]) * multiplier)


@njit(nogil=True, cache=True, error_model="numpy")
def widen_row(kind: Any, numbers: int, out: int, row: int, size: int) -> None:
    """A row of out [*, size], float32, becomes one of numbers."""
    narrow = array_at(kind, numbers + row * size * itemsize(kind))
    wide = array_at(FLOAT32, out + row * size * 4)
    for place in range(size):
        wide[place] = widened(kind, narrow[place])


def rotate_(
    heads: Tensor,
    num_turning: int,
    num_scaled: int,
    scale: float,
    angles: Tensor,
    positions: Tensor,
) -> None:
    """Rotate the first `num_turning` of heads [T, n, head_dim], contiguous, in place; the first
    `num_scaled` of them are multiplied by `scale` as well.

    angles [*, 2, rotary_dim / 2] float32: cosines and sines for pairs of features i and i + half,
    those at `positions` [T].
    """
    rows, count, size = heads.shape
    turn(
        marker(heads.dtype),
        heads.data_ptr(),
        0,
        0,
        np.float32(0.0),
        angles.data_ptr(),
        positions.data_ptr(),
        rows,
        count * size,
        num_turning,
        num_scaled,
        np.float32(scale),
        size,
        angles.shape[2],
    )


@njit(nogil=True, cache=True, error_model="numpy")
def turn_row(
    kind: Any,
    heads: int,
    query_norm: int,
    key_norm: int,
    eps: Any,
    angles: int,
    position: int,
    row: int,
    stride: int,
    num_turning: int,
    num_scaled: int,
    scale: Any,
    size: int,
    half: int,
) -> None:
    """`turn` for one row of several, at a position."""
    cosines = array_at(FLOAT32, angles + position * 2 * half * 4)
    sines = array_at(FLOAT32, angles + (position * 2 + 1) * half * 4)
    for head in range(num_turning):
        numbers = array_at(kind, heads + (row * stride + head * size) * itemsize(kind))
        norm = query_norm if head < num_scaled else key_norm
        if norm != 0:
            inverse = _inverse_rms(kind, numbers, size, eps)
            weights = array_at(FLOAT32, norm)
            for place in range(size):
                value = widened(kind, numbers[place]) * inverse * weights[place]
                numbers[place] = rounded(kind, value)
        factor = scale if head < num_scaled else np.float32(1.0)
        for place in range(half):
            left, right = widened(kind, numbers[place]), widened(kind, numbers[place + half])
            cosine, sine = cosines[place] * factor, sines[place] * factor
            numbers[place] = rounded(kind, left * cosine - right * sine)
            numbers[place + half] = rounded(kind, right * cosine + left * sine)
        for place in range(2 * half, size):
            numbers[place] = rounded(kind, widened(kind, numbers[place]) * factor)


@njit(nogil=True, cache=True, error_model="numpy")
def _turn_few(
    kind: Any,
    heads: int,
    query_norm: int,
    key_norm: int,
    eps: Any,
    angles: int,
    positions: int,
    rows: int,
    stride: int,
    num_turning: int,
    num_scaled: int,
    scale: Any,
    size: int,
    half: int,
) -> None:
    for row in range(rows):
        turn_row(
            kind,
            heads,
            query_norm,
            key_norm,
            eps,
            angles,
            array_at(ADDRESS, positions)[row],
            row,
            stride,
            num_turning,
            num_scaled,
            scale,
            size,
            half,
        )


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _turn_many(
    kind: Any,
    heads: int,
    query_norm: int,
    key_norm: int,
    eps: Any,
    angles: int,
    positions: int,
    rows: int,
    stride: int,
    num_turning: int,
    num_scaled: int,
    scale: Any,
    size: int,
    half: int,
) -> None:
    for row in prange(rows):
        turn_row(
            kind,
            heads,
            query_norm,
            key_norm,
            eps,
            angles,
            array_at(ADDRESS, positions)[row],
            row,
            stride,
            num_turning,
            num_scaled,
            scale,
            size,
            half,
        )


@njit(nogil=True, cache=True, error_model="numpy")
def turn(
    kind: Any,
    heads: int,
    query_norm: int,
    key_norm: int,
    eps: Any,
    angles: int,
    positions: int,
    rows: int,
    stride: int,
    num_turning: int,
    num_scaled: int,
    scale: Any,
    size: int,
    half: int,
) -> None:
    """`rotate_` by addresses. Before, queries and keys are normalised as `query_norm` and
    `key_norm` [size], float32, say; 0: they are not."""
    if rows * stride > _SMALL:
        _turn_many(
            kind,
            heads,
            query_norm,
            key_norm,
            eps,
            angles,
            positions,
            rows,
            stride,
            num_turning,
            num_scaled,
            scale,
            size,
            half,
        )
    else:
        _turn_few(
            kind,
            heads,
            query_norm,
            key_norm,
            eps,
            angles,
            positions,
            rows,
            stride,
            num_turning,
            num_scaled,
            scale,
            size,
            half,
        )
