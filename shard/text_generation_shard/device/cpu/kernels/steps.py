"""The steps of a layer as phases of a pass, and the computation of their items.

`given` is a `layers.Given`.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from text_generation_shard.device.cpu.kernels.attention import Attention
from text_generation_shard.device.cpu.kernels.grouped import STEPS
from text_generation_shard.device.cpu.kernels.llvm import call, itemsize
from text_generation_shard.device.cpu.kernels.multiply import cost_of_items
from text_generation_shard.device.cpu.kernels.pointwise import Norm, Rotation
from text_generation_shard.device.cpu.kernels.product import ROWS_AT_ONCE, TILE_ROWS, Product
from text_generation_shard.device.cpu.kernels.vector import STEP_BYTES

# A product of many rows has several phases, each for ROWS_AT_ONCE rows.
_NORM_BEFORE_ATTENTION: Final = 0
_QKV: Final = 1
_ROTATE: Final = 2
_ATTEND: Final = 3
_SUM_ATTENDED: Final = 4
OUT: Final = 5
_NORM_BEFORE_MLP: Final = 6
_GATE_UP: Final = 7
_SUM_INNER: Final = 8
DOWN: Final = 9
NUM_STEPS: Final = 10
_NUM_PRODUCTS: Final = 4
# After the last layer; HEAD and WIDEN only for logits.
NORM_BEFORE_HEAD: Final = 10
HEAD: Final = 11
WIDEN: Final = 12


@njit(inline="always")
def num_phases(given: Any) -> int:
    """Most phases of a pass."""
    blocks = -(-len(given.slots) // ROWS_AT_ONCE)
    count = len(given.layers) * (NUM_STEPS + _NUM_PRODUCTS * (blocks - 1)) + 1
    return count + (blocks + 1 if len(given.logits) else 0)


@njit
def write_step(given: Any, phases: Any, end: int, layer: int, step: int) -> int:
    """Append the phases of a step; returns the number of phases."""
    this, rows = given.passes[0], num_rows(given, layer, step)
    product = product_of(given, layer, step)
    for first in range(0, rows, ROWS_AT_ONCE if product.weights else rows + 1):
        phase = phases[end]
        end += 1
        phase.step, phase.layer = step, layer
        phase.first = first
        if product.weights:
            note_product(given, phase, product)
        elif step == _ATTEND:
            tasks = given.last_tasks if _is_narrowed(given, layer, step) else given.tasks
            phase.items = len(tasks) * this.num_kv_heads
        elif step == WIDEN and itemsize(given.kind) == 4:
            phase.items = 0
        elif this.sum_groups or step not in (_SUM_ATTENDED, _SUM_INNER):
            phase.items = rows
    return end


@njit(inline="always")
def note_product(given: Any, phase: Any, product: Product) -> None:
    """Write what a phase computes of a product."""
    if phase.step == HEAD:
        phase.items, phase.item_bytes = cost_of_items(given.head_kind, product)
    else:
        phase.items, phase.item_bytes = cost_of_items(given.weight_kind, product)
    phase.weights, phase.is_short = product.weights, product.num_rows <= TILE_ROWS


@njit(inline="always")
def _is_narrowed(given: Any, layer: int, step: int) -> Any:
    """Whether a step computes only the wanted tokens. Their rows are contiguous in all buffers,
    except for hidden states, which keep their places."""
    is_last = layer == len(given.layers) - 1 and step >= _ATTEND
    return is_last and len(given.wanted) < len(given.slots)


@njit(inline="always")
def num_rows(given: Any, layer: int, step: int) -> Any:
    """Tokens of a step."""
    return len(given.wanted) if _is_narrowed(given, layer, step) else len(given.slots)


@njit(inline="always")
def product_of(given: Any, layer: int, step: int) -> Product:
    """The product of a step; weights 0 if the step is no product."""
    this, weights, rows = given.passes[0], given.layers[layer], num_rows(given, layer, step)
    attended = this.num_heads * this.head_dim
    per_step = STEP_BYTES // itemsize(given.kind)
    where, steps, outputs = (0, 0, 0, 0), 0, 0
    if step == _QKV:
        where = weights.qkv, weights.qkv_scales, this.normed, this.heads
        steps = this.hidden_size // per_step
        outputs = attended + 2 * this.num_kv_heads * this.head_dim
    elif step == OUT:
        where = weights.out, weights.out_scales, this.attended, this.delta
        steps, outputs = attended // per_step, this.hidden_size
    elif step == _GATE_UP:
        where = weights.gate_up, weights.gate_up_scales, this.normed, this.inner
        steps, outputs = this.hidden_size // per_step, this.inner_size
    elif step == DOWN:
        where = weights.down, weights.down_scales, this.inner, this.delta
        steps, outputs = this.inner_size // per_step, this.hidden_size
    elif step == HEAD:
        where = this.head, this.head_scales, this.normed, this.scores
        steps, outputs = this.hidden_size // per_step, this.vocab_size
    parts: Any = np.int64(1)
    if step == OUT:
        parts = this.out_parts
    elif step == DOWN:
        parts = this.down_parts
    matrix, beside, inputs, out = where
    if this.sum_groups and step != HEAD:
        # int4 weights contain their scales; they need the input sums.
        beside = this.sums
    return Product(
        matrix, beside, inputs, out, rows, steps, outputs, step == _GATE_UP, parts, False
    )


@njit(inline="always")
def compute_step(given: Any, now: Any, item: int, ticket: int) -> None:
    """Compute an item of a phase, which is no exchange between ranks; ticket: see `may_store`."""
    this = given.passes[0]
    step, layer = now.step, now.layer
    if now.weights:
        multiply(given, now, product_of(given, layer, step), item, ticket)
    elif step == _ATTEND:
        call(this.attend, (_attention(given, layer), item))
    elif step == _ROTATE:
        _rotate(given, layer, item)
    elif step in (_NORM_BEFORE_ATTENTION, _NORM_BEFORE_MLP, NORM_BEFORE_HEAD):
        _normalize(given, layer, step, item)
    elif step == WIDEN:
        scores = this.scores + item * this.vocab_size * itemsize(given.kind)
        logits = _address(given.logits) + item * this.vocab_size * 4
        call(this.widen, (given.kind, scores, logits, this.vocab_size))
    elif step == _SUM_INNER:
        _sum_groups(given, this.inner, item, this.inner_size)
    else:
        _sum_groups(given, this.attended, item, this.num_heads * this.head_dim)


@njit(inline="always")
def multiply(given: Any, phase: Any, product: Product, item: int, ticket: int) -> None:
    """Compute an item of a phase's product."""
    this = given.passes[0]
    where = phase.first, item, ticket if phase.is_short else np.int64(0)
    if phase.step == HEAD:
        call(this.multiply_head, (given.head_kind, given.kind, product, *where))
    else:
        call(this.multiply, (given.weight_kind, given.kind, product, *where))


@njit(inline="always")
def _address(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@njit(inline="always")
def _attention(given: Any, layer: int) -> Attention:
    this = given.passes[0]
    tasks = given.last_tasks if _is_narrowed(given, layer, _ATTEND) else given.tasks
    return Attention(
        given.kind,
        this.heads,
        this.attended,
        given.cache + layer * given.layer_bytes,
        given.num_blocks,
        this.num_heads,
        this.num_kv_heads,
        this.head_dim,
        given.layers[layer].window,
        _address(given.slots),
        _address(given.block_tables),
        given.block_tables.shape[1],
        _address(tasks),
    )


@njit(inline="always")
def _rotate(given: Any, index: int, row: int) -> None:
    """Add the bias of a row, rotate its queries and keys, and store keys and values in the
    cache."""
    this, layer = given.passes[0], given.layers[index]
    num_rotated = this.num_heads + this.num_kv_heads
    width = (num_rotated + this.num_kv_heads) * this.head_dim
    if layer.qkv_bias:
        _add_bias(given, this.heads, layer.qkv_bias, row, width)
    if layer.is_rotated or layer.query_norm or this.attention_scale != np.float32(1.0):
        half: Any = this.half if layer.is_rotated else np.int64(0)
        rotation = Rotation(
            given.kind,
            this.heads,
            width,
            this.head_dim,
            num_rotated,
            this.num_heads,
            this.attention_scale,
            given.angles,
            _address(given.positions),
            half,
            layer.query_norm,
            layer.key_norm,
            this.eps,
        )
        call(this.rotate, (rotation, row))
    call(this.store, (_attention(given, index), row))


@njit(inline="always")
def _normalize(given: Any, index: int, step: int, row: int) -> None:
    """Initialize the hidden states of a row or add delta to them, then normalize them."""
    this, layer, size = given.passes[0], given.layers[index], given.passes[0].hidden_size
    hidden, delta, row_bytes = this.hidden, this.delta, size * itemsize(given.kind)
    weight, bias = layer.mlp_norm, layer.out_bias
    if _is_narrowed(given, index, step):
        hidden += (given.wanted[row] - row) * row_bytes
    if step == _NORM_BEFORE_ATTENTION:
        weight = layer.attention_norm
        delta = delta if index else np.int64(0)
        bias = given.layers[index - 1].down_bias if index else np.int64(0)
        if index == 0 and this.embedding:
            vector = this.embedding + given.input_ids[row] * row_bytes
            target = this.hidden + row * row_bytes
            call(this.embed, (given.kind, vector, this.embedding_multiplier, target, size))
    elif step == NORM_BEFORE_HEAD:
        weight, bias = this.final_norm, layer.down_bias
    if bias:
        _add_bias(given, delta, bias, row, size)
    norm = Norm(given.kind, hidden, delta, this.normed, weight, this.multiplier, this.eps, size)
    call(this.normalize, (norm, row))
    _sum_groups(given, this.normed, row, size)


@njit(inline="always")
def _add_bias(given: Any, out: int, bias: int, row: int, size: int) -> None:
    start = out + row * size * itemsize(given.kind)
    call(given.passes[0].add_bias, (given.kind, start, bias, size))


@njit(inline="always")
def _sum_groups(given: Any, inputs: int, row: int, num_inputs: int) -> None:
    this = given.passes[0]
    if this.sum_groups:
        groups = num_inputs * itemsize(given.kind) // STEP_BYTES // STEPS
        call(this.sum_groups, (inputs, this.sums, row, groups))
