"""All layers of a model in one call.

Why it is fast: called one after another from Python, the kernels of a layer and the allocations
between them cost 1.3 to 1.8 ms of a decode step of the 125 M checkpoint; from here they cost next
to nothing, and the interpreter is free for other threads meanwhile. The kernels are the same, and
so are the numbers.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import boolean, float32, from_dtype, int64, njit, types, uint8

from text_generation_shard.kernels.attention import attend, attend_task, store, task_signature
from text_generation_shard.kernels.calls import address_of, call
from text_generation_shard.kernels.grouped_linear import call_product, multiply_grouped
from text_generation_shard.kernels.linear import multiply
from text_generation_shard.kernels.pointwise import add_bias, normalize, turn
from text_generation_shard.kernels.vector import STEP_BYTES, itemsize

FIELDS: Final = (
    *("attention_norm", "qkv", "qkv_scales", "qkv_bias", "query_norm", "key_norm"),
    *("out", "out_scales", "out_bias", "mlp_norm", "gate_up", "gate_up_scales"),
    *("down", "down_scales", "down_bias", "is_turned", "window"),
)
LAYER: Final = np.dtype([(name, np.int64) for name in FIELDS])
"""A layer: where its weights, scales and biases lie, as the kernels take them (0: it has none);
whether positions are rotated in; how many tokens a query sees (0: all)."""
LAYERS: Final = from_dtype(LAYER)[::1]


class Sizes(NamedTuple):
    """What the layers have alike."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Of the features of a head, half of those that are rotated.
    half: int


class Constants(NamedTuple):
    """What the layers calculate with; float32."""

    attention_scale: Any
    eps: Any
    multiplier: Any


class Buffers(NamedTuple):
    """Addresses of rows for T tokens: hidden states, those normalised, and what a block adds to
    them; queries, keys and values; what attention makes of them; the feed-forward's inside."""

    hidden: int
    normed: int
    delta: int
    heads: int
    attended: int
    inner: int


class Pages(NamedTuple):
    """Where a pass finds itself in the cache; see `kernels.attention`."""

    cache: int
    layer_bytes: int
    num_blocks: int
    slots: Any
    block_tables: Any
    tasks: Any


class Codes(NamedTuple):
    """Where the kernels lie that the layers call; see `calls`."""

    normalize: int
    turn: int
    store: int
    attend: int
    attend_task: int
    add_bias: int
    multiply: int


Kernels = dict[str, tuple[Any, tuple[Any, ...]]]


def kernels(weight_kind: Any, kind: Any) -> Kernels:
    """What `Codes` names, and what each takes, for weights and rows of these types; what takes
    longest to compile first."""
    numbers, table, product = int64[::1], int64[:, ::1], (weight_kind, kind, *(int64,) * 7, boolean)
    grouped = multiply_grouped, (*(int64,) * 6, boolean)
    is_grouped = weight_kind == uint8
    return {
        "attend_task": (attend_task, task_signature(kind)),
        "attend": (attend, (kind, *(int64,) * 8, table, table, int64)),
        "multiply": grouped if is_grouped else (multiply, product),
        "turn": (turn, (kind, *(int64,) * 3, float32, *(int64,) * 5, float32, int64, int64)),
        "store": (store, (kind, *(int64,) * 6, numbers)),
        "normalize": (normalize, (kind, int64, int64, float32, int64, float32, *(int64,) * 3)),
        "add_bias": (add_bias, (kind, *(int64,) * 4)),
    }


def codes(weight_kind: Any, kind: Any) -> Codes:
    """The kernels for these types, as `run_layers` takes them; compiled if need be."""
    found = kernels(weight_kind, kind)
    return Codes(**{name: address_of(*kernel) for name, kernel in found.items()})


def signature(weight_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Of `run_layers`, for weights and rows of these types."""
    alike = types.NamedUniTuple
    constants = alike(float32, len(Constants._fields), Constants)
    paged = types.NamedTuple((int64, int64, int64, int64[::1], *[int64[:, ::1]] * 2), Pages)
    alone, sizes, buffers = (
        alike(int64, len(form._fields), form) for form in (Codes, Sizes, Buffers)
    )
    return weight_kind, kind, alone, LAYERS, sizes, constants, buffers, int64, paged


@njit(nogil=True, cache=True)
def run_layers(
    weight_kind: Any,
    kind: Any,
    codes: Any,
    layers: Any,
    sizes: Any,
    constants: Any,
    buffers: Any,
    angles: int,
    pages: Any,
) -> None:
    """Take the hidden states of T tokens through all layers, in place; what the last one adds to
    them is left in `buffers.delta`. angles [T, 2, half] as in `rotate_`."""
    rows = len(pages.slots)
    before = np.int64(0)
    for place in range(len(layers)):
        layer = layers[place]
        _add_norm(kind, codes, before, layer.attention_norm, rows, sizes, constants, buffers)
        cache = pages.cache + place * pages.layer_bytes
        _attend(
            weight_kind, kind, codes, layer, rows, sizes, constants, buffers, angles, cache, pages
        )
        _add_norm(kind, codes, buffers.delta, layer.mlp_norm, rows, sizes, constants, buffers)
        _feed_forward(weight_kind, kind, codes, layer, rows, sizes, buffers)
        before = buffers.delta


@njit(inline="always")
def _add_norm(
    kind: Any,
    codes: Any,
    delta: int,
    weight: int,
    rows: int,
    sizes: Any,
    constants: Any,
    buffers: Any,
) -> None:
    scales = constants.multiplier, weight, constants.eps
    given = kind, buffers.hidden, delta, *scales, buffers.normed, rows, sizes.hidden
    call(codes.normalize, given)


@njit(inline="always")
def _attend(
    weight_kind: Any,
    kind: Any,
    codes: Any,
    layer: Any,
    rows: int,
    sizes: Any,
    constants: Any,
    buffers: Any,
    angles: int,
    cache: int,
    pages: Any,
) -> None:
    num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    width, heads = (num_heads + 2 * num_kv_heads) * head_dim, buffers.heads
    weight = layer.qkv, layer.qkv_scales, layer.qkv_bias
    _project(weight_kind, kind, codes, weight, buffers.normed, heads, rows, sizes.hidden, width)
    if layer.is_turned or layer.query_norm or constants.attention_scale != np.float32(1.0):
        turned = (
            kind,
            heads,
            layer.query_norm,
            layer.key_norm,
            constants.eps,
            angles,
            rows,
            width,
            num_heads + num_kv_heads,
            num_heads,
            constants.attention_scale,
            head_dim,
            sizes.half if layer.is_turned else 0,
        )
        call(codes.turn, turned)
    counts = num_heads, num_kv_heads, head_dim, cache, pages.num_blocks
    call(codes.store, (kind, heads, *counts, pages.slots))
    seen = pages.block_tables, pages.tasks, layer.window
    call(codes.attend, (kind, codes.attend_task, heads, buffers.attended, *counts, *seen))
    weight = layer.out, layer.out_scales, layer.out_bias
    inputs, out = buffers.attended, buffers.delta
    _project(
        weight_kind, kind, codes, weight, inputs, out, rows, num_heads * head_dim, sizes.hidden
    )


@njit(inline="always")
def _feed_forward(
    weight_kind: Any, kind: Any, codes: Any, layer: Any, rows: int, sizes: Any, buffers: Any
) -> None:
    call_product(
        weight_kind,
        kind,
        codes.multiply,
        layer.gate_up,
        layer.gate_up_scales,
        buffers.normed,
        buffers.inner,
        rows,
        sizes.hidden * itemsize(kind) // STEP_BYTES,
        sizes.inner,
        True,
    )
    weight = layer.down, layer.down_scales, layer.down_bias
    inputs, out = buffers.inner, buffers.delta
    _project(weight_kind, kind, codes, weight, inputs, out, rows, sizes.inner, sizes.hidden)


@njit(inline="always")
def _project(
    weight_kind: Any,
    kind: Any,
    codes: Any,
    weight: Any,
    inputs: int,
    out: int,
    rows: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    """weight: addresses of the packed numbers, of scales and of a bias."""
    steps = num_inputs * itemsize(kind) // STEP_BYTES
    call_product(
        weight_kind,
        kind,
        codes.multiply,
        weight[0],
        weight[1],
        inputs,
        out,
        rows,
        steps,
        num_outputs,
        False,
    )
    if weight[2]:
        call(codes.add_bias, (kind, out, weight[2], rows, num_outputs))
