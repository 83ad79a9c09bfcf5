"""All layers of a model in one call: a program of phases that a team of threads goes through.

Why it is fast: called one after another from Python, the kernels of a layer and the allocations
between them cost 1.3 to 1.8 ms of a decode step of the 125 M checkpoint; from here they cost next
to nothing, and the interpreter is free for other threads meanwhile. What lies between two phases:
see `team`. The kernels are the same as elsewhere, and so are the numbers.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32, from_dtype, int64, njit, types, uint8

from text_generation_shard.device.cpu.kernels.attention import (
    BLOCK_SIZE,
    attend_task,
    store_token,
    task_signature,
)
from text_generation_shard.device.cpu.kernels.buffers import (
    LINE_BYTES,
    buffer_sizes,
    lines,
    place_buffers,
)
from text_generation_shard.device.cpu.kernels.calls import address_of, call
from text_generation_shard.device.cpu.kernels.grouped import STEPS
from text_generation_shard.device.cpu.kernels.grouped_linear import (
    cost_of_items,
    multiply_grouped_item,
    sum_groups,
)
from text_generation_shard.device.cpu.kernels.linear import item_signature, multiply_item
from text_generation_shard.device.cpu.kernels.pointwise import (
    add_bias,
    embed_row,
    normalize_row_of,
    turn_row,
    widen_row,
)
from text_generation_shard.device.cpu.kernels.results import ROWS_AT_ONCE, TILE_ROWS
from text_generation_shard.device.cpu.kernels.team import PHASE, PHASES, go_through
from text_generation_shard.device.cpu.kernels.vector import STEP_BYTES, itemsize

FIELDS: Final = (
    *("attention_norm", "qkv", "qkv_scales", "qkv_bias", "query_norm", "key_norm"),
    *("out", "out_scales", "out_bias", "mlp_norm", "gate_up", "gate_up_scales"),
    *("down", "down_scales", "down_bias", "is_turned", "window"),
)
LAYER: Final = np.dtype([(name, np.int64) for name in FIELDS])
"""A layer: where its weights, scales and biases lie, as the kernels take them (0: it has none);
whether positions are rotated in; how many tokens a query sees (0: all)."""
LAYERS: Final = from_dtype(LAYER)[::1]

CODES: Final = (
    *("item", "multiply", "multiply_head", "sum_groups", "embed", "normalize", "turn", "store"),
    *("attend", "add_bias", "widen"),
)
"""Where the functions lie that compute items, see `calls`; sum_groups: 0 where the weights do not
ask for it."""
SIZES: Final = ("hidden_size", "inner_size", "num_heads", "num_kv_heads", "head_dim", "half")
"""What the layers have alike; half: of the features of a head, half of those that are rotated."""
OTHERS: Final = ("board", "embedding", "head", "head_scales", "final_norm", "vocab_size")
"""The address of a `team`'s board; of the vectors [vocab_size, hidden_size] of the tokens (0: the
hidden states are given); of the head's weights (0: others make the logits) and its scales; and of
the norm before it."""
CONSTANTS: Final = ("embedding_multiplier", "attention_scale", "eps", "multiplier")
CHANGING: Final = (
    *("angles", "cache", "layer_bytes", "num_blocks"),
    *("hidden", "normed", "delta", "heads", "attended", "inner", "sums", "scores"),
)
"""Set by `run_layers`: what it is given, and addresses of rows for T tokens. Hidden states, those
normalised, and what a block adds to them; queries, keys and values; what attention makes of them;
the feed-forward's inside; for weights of 4 bits, the sums of what these are multiplied with; and
logits of the rows' kind."""
PASS: Final = np.dtype(
    [(name, np.int64) for name in (*CHANGING, *CODES, *SIZES, *OTHERS)]
    + [(name, np.float32) for name in CONSTANTS]
)
"""What a pass is computed from, beside its tokens."""


class Given(NamedTuple):
    """What the items of a pass are computed from."""

    weight_kind: Any
    # Of the head's weights, which are never INT4.
    head_kind: Any
    kind: Any
    # [1] of PASS, and the LAYERS.
    passes: Any
    layers: Any
    # [T] token ids, and which of the angles turn each.
    input_ids: Any
    positions: Any
    # [T], [R, width] and [N, 5]: see `attention`.
    slots: Any
    block_tables: Any
    tasks: Any
    # [S] the tokens whose last hidden states are wanted, in their order. Of fewer than T there are
    # tasks [M, 6] for these alone, last in each by how much earlier its results are put.
    wanted: Any
    last_tasks: Any
    # [S, vocab_size] in float32; [0, 0]: they are not wanted.
    logits: Any
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
# Behind the last layer; the head, if logits are wanted.
_NORM_BEFORE_HEAD: Final = 10
_HEAD: Final = 11
_WIDEN: Final = 12

Kernels = dict[str, tuple[Any, tuple[Any, ...]]]


def kernels(weight_kind: Any, kind: Any) -> Kernels:
    """What CODES names but the items themselves, and what each takes, for weights and rows of
    these types; what takes longest to compile first."""
    multiply = multiply_grouped_item if weight_kind == uint8 else multiply_item
    found: Kernels = {
        "attend": (attend_task, task_signature(kind)),
        "multiply": (multiply, item_signature(weight_kind, kind)),
        "turn": (turn_row, (kind, *(int64,) * 3, float32, *(int64,) * 6, float32, int64, int64)),
        "store": (store_token, (kind, *(int64,) * 8)),
        "normalize": (
            normalize_row_of,
            (kind, int64, int64, float32, int64, float32, *(int64,) * 3),
        ),
        "add_bias": (add_bias, (kind, *(int64,) * 4)),
        "embed": (embed_row, (kind, *(int64,) * 5, float32)),
        "widen": (widen_row, (kind, *(int64,) * 4)),
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
    kinds, table = (weight_kind, head_kind, kind), int64[:, ::1]
    tables = table, table, int64[::1], table
    tokens = int64[::1], int64[::1], int64[::1]
    given = from_dtype(PASS)[::1], LAYERS, int64, int64, types.UniTuple(int64, 3)
    return *kinds, *given, *tokens, *tables, float32[:, ::1], uint8[::1], int64


def signature_of_item(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Of `compute_item`, likewise."""
    taken = signature(weight_kind, head_kind, kind)
    # Neither what `run_layers` writes into PASS nor the memory and the number of threads.
    given = types.NamedTuple((*taken[:5], *taken[8:-2], PHASES), Given)
    return given, int64, int64, int64


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def run_layers(
    weight_kind: Any,
    head_kind: Any,
    kind: Any,
    passes: Any,
    layers: Any,
    hidden: int,
    angles: int,
    cache: Any,
    input_ids: Any,
    positions: Any,
    slots: Any,
    block_tables: Any,
    tasks: Any,
    wanted: Any,
    last_tasks: Any,
    logits: Any,
    memory: Any,
    num_threads: int,
) -> int:
    """Take T tokens through all layers; what the last one adds is taken in by the hidden states
    that are wanted, and the head makes logits of them if there is room for such. Of tokens that are
    not wanted the last layer computes keys and values, and nothing else.

    hidden: the address of T hidden states, or 0: nobody asks for them. angles: that of the angles
    as in `rotate_`. cache: where it lies, the bytes of a layer, and its blocks, see `attention`.
    memory: bytes for the buffers of the pass; returns how many it takes, and where there are less,
    nothing else is done. For the rest see `Given`.
    """
    rows, this = len(slots), passes[0]
    this.hidden, this.angles = hidden, angles
    this.cache, this.layer_bytes, this.num_blocks = cache
    is_widened = len(logits) > 0 and itemsize(kind) < 4
    sizes = buffer_sizes(kind, this, rows, len(logits) if is_widened else 0)
    needed: int = LINE_BYTES + sum(sizes)
    if len(memory) < needed:
        return needed
    place_buffers(this, sizes, lines(np.int64(memory.ctypes.data)))
    blocks = -(-rows // ROWS_AT_ONCE)
    count = len(layers) * (_NUM_STEPS + _NUM_PRODUCTS * (blocks - 1)) + 1
    phases = np.zeros(count + (blocks + 1 if len(logits) else 0), PHASE)
    # Scores of float32 are logits already.
    if not is_widened:
        this.scores = np.int64(logits.ctypes.data)
    kinds, tokens = (weight_kind, head_kind, kind), (input_ids, positions, slots)
    attention = block_tables, tasks, wanted, last_tasks
    given = Given(*kinds, passes, layers, *tokens, *attention, logits, phases)
    _write_program(given)
    go_through(this.item, given, phases, this.board, num_threads)
    return needed


@njit(inline="always")
def _write_program(given: Any) -> None:
    """The phases of all layers, and of what comes behind them."""
    place = 0
    for layer in range(len(given.layers)):
        for step in range(_NUM_STEPS):
            place = _write_step(given, place, layer, step)
    last = len(given.layers) - 1
    place = _write_step(given, place, last, _NORM_BEFORE_HEAD)
    if len(given.logits):
        place = _write_step(given, place, last, _HEAD)
        _write_step(given, place, last, _WIDEN)


@njit
def _write_step(given: Any, place: int, layer: int, step: int) -> int:
    """The phases of a step, from a place on; returns the place behind them."""
    this, rows = given.passes[0], _num_rows(given, layer, step)
    weights, _, _, _, num_inputs, num_outputs = _product(given, layer, step)
    for first in range(0, rows, ROWS_AT_ONCE if weights else rows + 1):
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
            tasks = given.last_tasks if _is_narrowed(given, layer, step) else given.tasks
            phase.items = len(tasks) * this.num_kv_heads
        elif step == _WIDEN and itemsize(given.kind) == 4:
            phase.items = 0
        elif this.sum_groups or step not in (_SUM_ATTENDED, _SUM_INNER):
            phase.items = rows
    return place


@njit(inline="always")
def _is_narrowed(given: Any, layer: int, step: int) -> Any:
    """Whether a step is for the wanted tokens alone: of these there are rows one behind the other,
    but for the hidden states, which stay where they are."""
    is_last = layer == len(given.layers) - 1 and step >= _ATTEND
    return is_last and len(given.wanted) < len(given.slots)


@njit(inline="always")
def _num_rows(given: Any, layer: int, step: int) -> Any:
    """For how many tokens a step is."""
    return len(given.wanted) if _is_narrowed(given, layer, step) else len(given.slots)


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
    where = this.head, this.head_scales, this.normed, this.scores
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
    elif step == _WIDEN:
        logits = np.int64(given.logits.ctypes.data)
        call(this.widen, (given.kind, this.scores, logits, item, this.vocab_size))
    elif step == _SUM_INNER:
        _sum_groups(given, this.inner, item, this.inner_size)
    else:
        _sum_groups(given, this.attended, item, this.num_heads * this.head_dim)


@njit(inline="always")
def _multiply(given: Any, phase: int, item: int, ticket: int) -> None:
    this, where = given.passes[0], given.phases[phase]
    product = _product(given, where.layer, where.step)
    weights, scales, inputs, out, num_inputs, num_outputs = product
    rows = where.first, where.last, np.int64(_num_rows(given, where.layer, where.step))
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
    tasks, out = given.tasks, this.attended
    if _is_narrowed(given, layer, _ATTEND):
        tasks = given.last_tasks
        out -= tasks[task, 5] * this.num_heads * this.head_dim * itemsize(given.kind)
    seen = given.block_tables[tasks[task, 0]], tasks[task]
    buffers = given.kind, this.heads, out
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
        turned = given.kind, this.heads, *norms, this.angles, given.positions[row]
        features = row, width, num_turning, this.num_heads
        half = this.half if layer.is_turned else 0
        call(this.turn, (*turned, *features, this.attention_scale, this.head_dim, half))
    counts = this.num_heads, this.num_kv_heads, this.head_dim
    blocks = this.cache + place * this.layer_bytes, this.num_blocks
    call(this.store, (given.kind, this.heads, *counts, *blocks, row, given.slots[row]))


@njit(inline="always")
def _normalize(given: Any, phase: int, row: int) -> None:
    """Hidden states of a row begin, or take in what the block before adds, and are normalised."""
    this, place = given.passes[0], given.phases[phase].layer
    layer, hidden, delta = given.layers[place], this.hidden, this.delta
    weight, bias, step = layer.mlp_norm, layer.out_bias, given.phases[phase].step
    if _is_narrowed(given, place, step):
        hidden += (given.wanted[row] - row) * this.hidden_size * itemsize(given.kind)
    if step == _NORM_BEFORE_ATTENTION:
        weight = layer.attention_norm
        delta = delta if place else np.int64(0)
        bias = given.layers[place - 1].down_bias if place else np.int64(0)
        if place == 0 and this.embedding:
            where = given.kind, this.embedding, given.input_ids[row], this.hidden
            call(this.embed, (*where, row, this.hidden_size, this.embedding_multiplier))
    elif step == _NORM_BEFORE_HEAD:
        weight, bias = this.final_norm, layer.down_bias
    if bias:
        _add_bias(given, delta, bias, row, this.hidden_size)
    scales = this.multiplier, weight, this.eps
    target = this.normed, row, this.hidden_size
    call(this.normalize, (given.kind, hidden, delta, *scales, *target))
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
