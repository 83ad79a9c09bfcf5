"""Compiling every kernel before the first request needs one."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from numba import boolean, float32, int8, int64, typeof, uint8

from text_generation_shard.kernels import (
    are_vectors_wide,
    attention,
    choice,
    grouped_linear,
    layers,
    linear,
    pointwise,
)
from text_generation_shard.kernels.vector import marker


def compile_all(dtype: torch.dtype, quantize: str | None) -> float:
    """Compile what models of this type run, or read it from the cache of an earlier start (numba's,
    beside the source or in NUMBA_CACHE_DIR). Returns the seconds it took."""
    start = time.monotonic()
    for function, signature in _signatures(typeof(marker(dtype)), quantize):
        function.compile(signature)
    return time.monotonic() - start


def _signatures(kind: Any, quantize: str | None) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    numbers, table = int64[::1], int64[:, ::1]
    for multiply in (linear.multiply, linear.multiply_gated):
        yield multiply, (kind, kind, *(int64,) * 7)
        if quantize is not None:
            yield multiply, (int8, kind, *(int64,) * 7)
    if quantize == "int4" and are_vectors_wide():
        yield grouped_linear.multiply_grouped, (*(int64,) * 6, boolean)
    yield pointwise.normalize, (kind, int64, int64, float32, int64, float32, *(int64,) * 3)
    yield pointwise.turn, (kind, *(int64,) * 3, float32, *(int64,) * 5, float32, int64, int64)
    yield attention.store, (kind, *(int64,) * 6, numbers)
    yield attention.attend, (kind, *(int64,) * 7, table, table, int64)
    forms = {"int8": int8, "int4": uint8} if are_vectors_wide() else {}
    weight_kind = kind if quantize is None else forms.get(quantize, kind)
    yield layers.run_layers, layers.signature(weight_kind, kind)
    yield choice.choose_one, choice.ONE
    yield choice.choose_many, choice.MANY
