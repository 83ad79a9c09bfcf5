"""All layers of a model in one call: a program of phases that a team of threads goes through.

Why it is fast: called one after another from Python, the kernels of a layer and the allocations
between them cost 1.3 to 1.8 ms of a decode step of the 125 M checkpoint; from here they cost next
to nothing, and the interpreter is free for other threads meanwhile. What lies between two phases:
see `team`. The kernels are the same as elsewhere, and so are the numbers.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32, from_dtype, int64, njit, types, uint8

from text_generation_shard.kernels.attention import (
    BLOCK_SIZE,
    attend_task,
    store_token,
    task_signature,
)
from text_generation_shard.kernels.calls import address_of, call
from text_generation_shard.kernels.grouped import GROUP, STEPS
from text_generation_shard.kernels.grouped_linear import (
    cost_of_items,
    multiply_grouped_item,
    sum_groups,
)
from text_generation_shard.kernels.linear import item_signature, multiply_item
from text_generation_shard.kernels.pointwise import add_bias, normalize_row_of, turn_row
from text_generation_shard.kernels.results import ROWS_AT_ONCE, TILE_ROWS
from text_generation_shard.kernels.team import PHASE, PHASES, go_through
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


NUMBERS_PER_PAIR: Final = 2 * GROUP
"""Of a row that weights of 4 bits are multiplied with, for two numbers of `Buffers.sums`."""


CODES: Final = (
    *("item", "multiply", "multiply_head", "sum_groups", "normalize", "turn", "store", "attend"),
    "add_bias",
)
"""Where the functions lie that compute items, see `calls`; sum_groups: 0 where the weights do not
ask for it."""
SIZES: Final = ("hidden_size", "inner_size", "num_heads", "num_kv_heads", "head_dim", "half")
"""What the layers have alike; half: of the features of a head, half of those that are rotated."""
OTHERS: Final = ("board", "final_norm", "head_scales", "vocab_size")
"""The address of a `team`'s board; of the head, the norm before it and its scales."""
CONSTANTS: Final = ("attention_scale", "eps", "multiplier")
BUFFERS: Final = ("hidden", "normed", "delta", "heads", "attended", "inner", "sums")
"""Addresses of rows for T tokens: hidden states, those normalised, and what a block adds to them;
queries, keys and values; what attention makes of them; the feed-forward's inside; and, for weights
of 4 bits, the sums of what these are multiplied with."""
CHANGING: Final = (
    *BUFFERS,
    *("logits", "head", "angles", "cache", "layer_bytes", "num_blocks", "num_threads"),
)
"""What is another in each pass: buffers; logits [T, vocab_size], of the rows' kind, and the weights
of the head that makes them (0: it is not wanted); angles [T, 2, half] as in `rotate_`; where the
cache lies, see `attention`; and how many threads there are."""
PASS: Final = np.dtype(
    [(name, np.int64) for name in (*CHANGING, *CODES, *SIZES, *OTHERS)]
    + [(name, np.float32) for name in CONSTANTS]
)
"""What a pass is computed from, beside its tokens; what changes comes first."""


class Given(NamedTuple):
    """What the items of a pass are computed from."""

    weight_kind: Any
    # Of the head's weights, which are never INT4.
    head_kind: Any
    kind: Any
    # [1] of PASS, and the LAYERS.
    passes: Any
    layers: Any
    # [T], [R, width] and [N, 5]: see `attention`.
    slots: Any
    block_tables: Any
    tasks: Any
    phases: Any


# The steps of a layer. Products of many rows are several phases each, for ROWS_AT_ONCE of them.
_NORM_BEFORE_ATTENTION: Final = 0
_QKV: Final = 1
_TURN: Final = 2
_ATTEND: Final = 3
_SUM_ATTENDED: Final = 4
_OUT: Final = 5
_NORM_BEFORE_MLP: Final = 6
_GATE_UP: Final = 7
_SUM_INNER: Final = 8
_DOWN: Final = 9
_NUM_STEPS: Final = 10
_NUM_PRODUCTS: Final = 4
# Behind the last layer, if logits are wanted.
_NORM_BEFORE_HEAD: Final = 10
_HEAD: Final = 11

Kernels = dict[str, tuple[Any, tuple[Any, ...]]]


def kernels(weight_kind: Any, kind: Any) -> Kernels:
    """What CODES names but the items themselves, and what each takes, for weights and rows of
    these types; what takes longest to compile first."""
    multiply = multiply_grouped_item if weight_kind == uint8 else multiply_item
    found: Kernels = {
        "attend": (attend_task, task_signature(kind)),
        "multiply": (multiply, item_signature(weight_kind, kind)),
        "turn": (turn_row, (kind, *(int64,) * 3, float32, *(int64,) * 5, float32, int64, int64)),
        "store": (store_token, (kind, *(int64,) * 8)),
        "normalize": (
            normalize_row_of,
            (kind, int64, int64, float32, int64, float32, *(int64,) * 3),
        ),
        "add_bias": (add_bias, (kind, *(int64,) * 4)),
    }
    if weight_kind == uint8:
        found["sum_groups"] = sum_groups, (int64,) * 4
    return found


def codes(weight_kind: Any, head_kind: Any, kind: Any) -> dict[str, int]:
    """CODES for weights of the layers, those of the head, and rows of these types; compiled if need
    be."""
    found = {name: address_of(*kernel) for name, kernel in kernels(weight_kind, kind).items()}
    head = address_of(multiply_item, item_signature(head_kind, kind))
    item = address_of(compute_item, signature_of_item(weight_kind, head_kind, kind))
    return {"sum_groups": 0, "multiply_head": head, "item": item} | found


def signature(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Of `run_layers`, for the same types."""
    kinds, tables = (weight_kind, head_kind, kind), (int64[::1], int64[:, ::1], int64[:, ::1])
    return *kinds, from_dtype(PASS)[::1], LAYERS, *tables


def signature_of_item(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Of `compute_item`, likewise."""
    given = types.NamedTuple((*signature(weight_kind, head_kind, kind), PHASES), Given)
    return given, int64, int64, int64


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def run_layers(
    weight_kind: Any,
    head_kind: Any,
    kind: Any,
    passes: Any,
    layers: Any,
    slots: Any,
    block_tables: Any,
    tasks: Any,
) -> None:
    """Take the hidden states of T tokens through all layers, in place; what the last one adds to
    them is left in the buffer of what is added, or with a head, taken in. See `Given`."""
    rows, this = len(slots), passes[0]
    blocks = -(-rows // ROWS_AT_ONCE)
    count = len(layers) * (_NUM_STEPS + _NUM_PRODUCTS * (blocks - 1))
    phases = np.zeros(count + (1 + blocks if this.head else 0), PHASE)
    tables = slots, block_tables, tasks
    given = Given(weight_kind, head_kind, kind, passes, layers, *tables, phases)
    _write_program(given)
    go_through(this.item, given, phases, this.board, this.num_threads)
    bias = layers[len(layers) - 1].down_bias
    if bias and not this.head:
        call(this.add_bias, (kind, this.delta, bias, np.int64(rows), this.hidden_size))


@njit(inline="always")
def _write_program(given: Any) -> None:
    """The phases of all layers, and of the head."""
    place = 0
    for layer in range(len(given.layers)):
        for step in range(_NUM_STEPS):
            place = _write_step(given, place, layer, step)
    if given.passes[0].head:
        for step in (_NORM_BEFORE_HEAD, _HEAD):
            place = _write_step(given, place, len(given.layers) - 1, step)


@njit
def _write_step(given: Any, place: int, layer: int, step: int) -> int:
    """The phases of a step, from a place on; returns the place behind them."""
    this, rows = given.passes[0], len(given.slots)
    weights, _, _, _, num_inputs, num_outputs = _product(given, layer, step)
    for first in range(0, rows, ROWS_AT_ONCE if weights else rows):
        phase = given.phases[place]
        place += 1
        phase.step, phase.layer = step, layer
        phase.first, phase.last = first, min(rows, first + ROWS_AT_ONCE)
        if weights:
            steps = num_inputs * itemsize(given.kind) // STEP_BYTES
            size = rows, steps, num_outputs, step == _GATE_UP
            if step == _HEAD:
                phase.items, phase.item_bytes = cost_of_items(given.head_kind, *size)
            else:
                phase.items, phase.item_bytes = cost_of_items(given.weight_kind, *size)
            phase.weights, phase.is_short = weights, rows <= TILE_ROWS
        elif step == _ATTEND:
            phase.items = len(given.tasks) * this.num_kv_heads
        elif this.sum_groups or step not in (_SUM_ATTENDED, _SUM_INNER):
            phase.items = rows
    return place


@njit(inline="always")
def _product(given: Any, layer: int, step: int) -> Any:
    """Of a step: weights and scales, or 0 if it is no product; inputs and outputs, and how many of
    each a row has."""
    this, weights = given.passes[0], given.layers[layer]
    attended = this.num_heads * this.head_dim
    if step == _QKV:
        width = attended + 2 * this.num_kv_heads * this.head_dim
        where = weights.qkv, weights.qkv_scales, this.normed, this.heads
        return *where, this.hidden_size, width
    if step == _OUT:
        where = weights.out, weights.out_scales, this.attended, this.delta
        return *where, attended, this.hidden_size
    if step == _GATE_UP:
        where = weights.gate_up, weights.gate_up_scales, this.normed, this.inner
        return *where, this.hidden_size, this.inner_size
    if step == _DOWN:
        where = weights.down, weights.down_scales, this.inner, this.delta
        return *where, this.inner_size, this.hidden_size
    where = this.head, this.head_scales, this.normed, this.logits
    if step == _HEAD:
        return *where, this.hidden_size, this.vocab_size
    return 0, 0, 0, 0, 0, 0


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def compute_item(given: Any, phase: int, item: int, ticket: int) -> None:
    """An item of a phase; ticket: see `team.may_put`."""
    this, step = given.passes[0], given.phases[phase].step
    if given.phases[phase].weights:
        _multiply(given, phase, item, ticket)
    elif step == _ATTEND:
        _attend(given, phase, item)
    elif step == _TURN:
        _turn(given, phase, item)
    elif step in (_NORM_BEFORE_ATTENTION, _NORM_BEFORE_MLP, _NORM_BEFORE_HEAD):
        _normalize(given, phase, item)
    elif step == _SUM_INNER:
        _sum_groups(given, this.inner, item, this.inner_size)
    else:
        _sum_groups(given, this.attended, item, this.num_heads * this.head_dim)


@njit(inline="always")
def _multiply(given: Any, phase: int, item: int, ticket: int) -> None:
    this, where = given.passes[0], given.phases[phase]
    product = _product(given, where.layer, where.step)
    weights, scales, inputs, out, num_inputs, num_outputs = product
    rows = where.first, where.last, np.int64(len(given.slots))
    sizes = num_inputs * itemsize(given.kind) // STEP_BYTES, num_outputs, where.step == _GATE_UP
    where_to = inputs, out, ticket if where.is_short else np.int64(0)
    if where.step == _HEAD:
        kinds = given.head_kind, given.kind
        call(this.multiply_head, (*kinds, item, rows, sizes, weights, scales, *where_to))
    else:
        # Weights of 4 bits have their scales among them; what they need is the inputs' sums.
        beside = this.sums if this.sum_groups else scales
        kinds = given.weight_kind, given.kind
        call(this.multiply, (*kinds, item, rows, sizes, weights, beside, *where_to))


@njit(inline="always")
def _attend(given: Any, phase: int, item: int) -> None:
    this, layer = given.passes[0], given.phases[phase].layer
    task, head = item // this.num_kv_heads, item % this.num_kv_heads
    head_bytes = this.num_blocks * 2 * this.head_dim * BLOCK_SIZE * itemsize(given.kind)
    blocks = this.cache + layer * this.layer_bytes + head * head_bytes
    counts = this.num_heads, this.num_kv_heads, this.head_dim
    seen = given.block_tables[given.tasks[task, 0]], given.tasks[task]
    buffers = given.kind, this.heads, this.attended
    call(this.attend, (*buffers, *counts, blocks, *seen, head, given.layers[layer].window))


@njit(inline="always")
def _turn(given: Any, phase: int, row: int) -> None:
    """Queries and keys of a row get their bias and their positions; keys and values go into the
    cache."""
    this, place = given.passes[0], given.phases[phase].layer
    layer, num_turning = given.layers[place], this.num_heads + this.num_kv_heads
    width = (num_turning + this.num_kv_heads) * this.head_dim
    if layer.qkv_bias:
        _add_bias(given, this.heads, layer.qkv_bias, row, width)
    if layer.is_turned or layer.query_norm or this.attention_scale != np.float32(1.0):
        norms = layer.query_norm, layer.key_norm, this.eps
        turned = given.kind, this.heads, *norms, this.angles
        features = row, width, num_turning, this.num_heads
        half = this.half if layer.is_turned else 0
        call(this.turn, (*turned, *features, this.attention_scale, this.head_dim, half))
    counts = this.num_heads, this.num_kv_heads, this.head_dim
    blocks = this.cache + place * this.layer_bytes, this.num_blocks
    call(this.store, (given.kind, this.heads, *counts, *blocks, row, given.slots[row]))


@njit(inline="always")
def _normalize(given: Any, phase: int, row: int) -> None:
    """Hidden states of a row take in what the block before adds, and are normalised."""
    this, place = given.passes[0], given.phases[phase].layer
    layer, delta = given.layers[place], this.delta
    weight, bias, step = layer.mlp_norm, layer.out_bias, given.phases[phase].step
    if step == _NORM_BEFORE_ATTENTION:
        weight = layer.attention_norm
        delta = delta if place else np.int64(0)
        bias = given.layers[place - 1].down_bias if place else np.int64(0)
    elif step == _NORM_BEFORE_HEAD:
        weight, bias = this.final_norm, layer.down_bias
    if bias:
        _add_bias(given, delta, bias, row, this.hidden_size)
    scales = this.multiplier, weight, this.eps
    where = this.normed, row, this.hidden_size
    call(this.normalize, (given.kind, this.hidden, delta, *scales, *where))
    _sum_groups(given, this.normed, row, this.hidden_size)


@njit(inline="always")
def _add_bias(given: Any, out: int, bias: int, row: int, size: int) -> None:
    start = out + row * size * itemsize(given.kind)
    call(given.passes[0].add_bias, (given.kind, start, bias, np.int64(1), size))


@njit(inline="always")
def _sum_groups(given: Any, inputs: int, row: int, num_inputs: int) -> None:
    this = given.passes[0]
    if this.sum_groups:
        groups = num_inputs * itemsize(given.kind) // STEP_BYTES // STEPS
        call(this.sum_groups, (inputs, this.sums, row, groups))
