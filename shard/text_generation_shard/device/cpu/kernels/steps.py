"""The steps of all layers as phases of a pass, and the computation of their items.

With several ranks, exchanges are between the steps. An operation covers as many rows of a pass as
fit into a slot. This rank's part is written to its slot, and one item publishes it. The following
items, one per row, wait for all ranks and combine the parts. Exchanged are embeddings, which one
rank has; float32 sums of `out` and `down`, which a binary tree adds and which are rounded once; and
the scores of each rank's part of the vocabulary.

`given` is a `layers.Given`, whose `PASS` has the fields of an exchange. A thread waits within an
item; meanwhile the other threads look for work and yield their cores. After a failed wait, the
remaining items of the pass do nothing, and `status` holds the reason.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from text_generation_shard.device.cpu.kernels import exchange, llvm, vector
from text_generation_shard.device.cpu.kernels.attention import Attention
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, LANES, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.multiply import STEPS, cost_of_items, sums_bytes
from text_generation_shard.device.cpu.kernels.pointwise import Norm, Rotation
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
from text_generation_shard.device.cpu.kernels.tile import ROWS_AT_ONCE, TILE_ROWS, Product
from text_generation_shard.device.cpu.kernels.vector import FLOAT32, STEP_BYTES

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
NUM_PRODUCTS: Final = 4
# After the last layer; HEAD and WIDEN only for logits.
NORM_BEFORE_HEAD: Final = 10
HEAD: Final = 11
WIDEN: Final = 12
# Of exchanges between ranks.
_EMBED: Final = 13
_PUBLISH: Final = 14
_TAKE_VECTORS: Final = 15
_TAKE_SUMS: Final = 16
_TAKE_SCORES: Final = 17
# Levels of the tree of sums; bounds the number of ranks.
_LEVELS: Final = 16


@njit(inline="always")
def write_phases(given: Any, phases: Any) -> None:
    """Write the phases of all layers, final norm and head, with the exchanges of several ranks."""
    # No literals as arguments: numba compiles a function again for each literal.
    end, last = np.int64(0), len(given.layers) - 1
    word, has_ranks = np.int64(given.passes[0].word), given.passes[0].size > 1
    if has_ranks:
        end, word = _write_operations(given, phases, end, word, np.int64(0), np.int64(_EMBED))
    for layer in range(len(given.layers)):
        for step in range(NUM_STEPS):
            if has_ranks and step in (OUT, DOWN):
                end, word = _write_operations(given, phases, end, word, layer, step)
            else:
                end = write_step(given, phases, end, layer, step)
    end = write_step(given, phases, end, last, np.int64(NORM_BEFORE_HEAD))
    if len(given.logits) and has_ranks:
        end, word = _write_operations(given, phases, end, word, last, np.int64(HEAD))
    elif len(given.logits):
        for step in range(HEAD, WIDEN + 1):
            end = write_step(given, phases, end, last, step)


@njit
def _write_operations(
    given: Any, phases: Any, end: int, word: int, layer: int, step: int
) -> tuple[int, int]:
    """Append the phases of a step with an exchange; returns the number of phases, and the word of
    the next operation."""
    this = given.passes[0]
    rows = len(given.slots) if step == _EMBED else num_rows(given, layer, step)
    row_bytes, take = this.hidden_size * 4, _TAKE_SUMS
    if step == _EMBED:
        row_bytes, take = this.hidden_size * llvm.itemsize(given.kind), _TAKE_VECTORS
    elif step == HEAD:
        row_bytes, take = this.vocab_size * llvm.itemsize(given.kind), _TAKE_SCORES
    chunk = this.slot_bytes // row_bytes
    for begin in range(0, rows, chunk):
        count = min(rows - begin, chunk)
        for first in range(0, count, count if step == _EMBED else ROWS_AT_ONCE):
            phase = phases[end]
            _note_operation(phase, step, layer, word, begin, count)
            phase.first, phase.items = first, count
            if step != _EMBED:
                note_product(given, phase, _partial_product(given, phase))
            end += 1
        _note_operation(phases[end], _PUBLISH, layer, word, begin, count)
        phases[end].items = 1
        _note_operation(phases[end + 1], take, layer, word, begin, count)
        phases[end + 1].items = count
        end += 2
        word += 1
    return end, word


@njit
def _note_operation(phase: Any, step: int, layer: int, word: int, begin: int, count: int) -> None:
    phase.step, phase.layer, phase.word = step, layer, word
    phase.begin, phase.end = begin, begin + count


@njit(inline="always")
def _partial_product(given: Any, phase: Any) -> Product:
    """The product of an operation's rows; its output is this rank's slot."""
    this, whole = given.passes[0], product_of(given, phase.layer, phase.step)
    beside = whole.beside
    if this.sum_groups and phase.step != HEAD:
        beside += phase.begin * sums_bytes(whole.steps // STEPS)
    return Product(
        whole.weights,
        beside,
        whole.inputs + phase.begin * whole.steps * STEP_BYTES,
        exchange.slot(this, this.rank, phase.word),
        phase.end - phase.begin,
        whole.steps,
        whole.num_outputs,
        whole.is_gated,
        whole.num_parts,
        phase.step != HEAD,
    )


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def compute_item(given: Any, phases: Any, phase: int, item: int, ticket: int) -> None:
    """Compute an item of a phase; ticket: see `may_store`."""
    this, now = given.passes[0], phases[phase]
    if llvm.load_word(this.status) != exchange.ARRIVED:
        # `may_store` must be called once for each item, also without computing it.
        if now.is_short:
            may_store(ticket)
    elif now.word == 0:
        compute_step(given, now, item, ticket)
    elif now.weights:
        multiply(given, now, _partial_product(given, now), item, ticket)
    elif now.step == _EMBED:
        _embed(given, now, item)
    elif now.step == _PUBLISH:
        exchange.publish(this, now.word)
    elif _all_are_there(this, now.word):
        if now.step == _TAKE_SUMS:
            _take_sums(given, now, item)
        elif now.step == _TAKE_VECTORS:
            _take_vector(given, now, item)
        else:
            _take_scores(given, now, item)


@njit(inline="always")
def _embed(given: Any, phase: Any, item: int) -> None:
    """If the token is in this rank's part, write its embedding to the slot."""
    this, row = given.passes[0], phase.begin + item
    own = given.input_ids[row] - this.first_token
    row_bytes = this.hidden_size * llvm.itemsize(given.kind)
    if 0 <= own < this.vocab_size:
        source, multiplier = this.hidden + row * row_bytes, np.float32(1.0)
        if this.vectors:
            source, multiplier = this.vectors + own * row_bytes, this.embedding_multiplier
        target = exchange.slot(this, this.rank, phase.word) + item * row_bytes
        llvm.call(this.embed, (given.kind, source, multiplier, target, this.hidden_size))


@njit(inline="always")
def _take_vector(given: Any, phase: Any, item: int) -> None:
    """Read a token's embedding from its rank's slot into the hidden states."""
    this, row = given.passes[0], phase.begin + item
    row_bytes = this.hidden_size * llvm.itemsize(given.kind)
    owner = given.input_ids[row] // this.vocab_size
    source = exchange.slot(this, owner, phase.word) + item * row_bytes
    target = this.hidden + row * row_bytes
    llvm.call(this.embed, (given.kind, source, np.float32(1.0), target, this.hidden_size))


@njit(inline="always")
def _take_scores(given: Any, phase: Any, item: int) -> None:
    """Assemble the logits of a row, without the padding of the vocabulary."""
    this, num_tokens = given.passes[0], given.logits.shape[1]
    row = np.int64(given.logits.ctypes.data) + (phase.begin + item) * num_tokens * 4
    for rank in range(this.size):
        first = rank * this.vocab_size
        count = min(this.vocab_size, num_tokens - first)
        if count > 0:
            slot = exchange.slot(this, rank, phase.word)
            source = slot + item * this.vocab_size * llvm.itemsize(given.kind)
            llvm.call(this.widen, (given.kind, source, row + first * 4, count))


@njit(inline="always")
def _take_sums(given: Any, phase: Any, item: int) -> None:
    """Sum the parts of all ranks for a row into delta."""
    this = given.passes[0]
    size, levels = this.hidden_size, llvm.scratch(_LEVELS)
    target = this.delta + (phase.begin + item) * size * llvm.itemsize(given.kind)
    for start in range(0, size, LANES):
        count, at = min(LANES, size - start), (item * size + start) * 4
        value = _sum_of_ranks(this, phase.word, at, count, levels)
        vector.store_numbers(given.kind, value, target + start * llvm.itemsize(given.kind), count)


@vector.inlined
def _sum_of_ranks(this: Any, word: int, at: int, count: int, levels: int) -> Any:
    """Add the parts of all ranks by a binary tree, as `tile.add_part` does: a level holds the
    sum of 2 ** level ranks that waits for its neighbour."""
    for rank in range(this.size):
        level, rest = levels, rank
        value = vector.load_numbers(FLOAT32, exchange.slot(this, rank, word) + at, count)
        while rest & 1:
            value = llvm.load(FLOATS, level) + value
            level += VECTOR_BYTES
            rest >>= 1
        llvm.store(value, level)
    # If the number of ranks is no power of two, add the remaining levels.
    rest, level = this.size, levels
    while not rest & 1:
        level += VECTOR_BYTES
        rest >>= 1
    value = llvm.load(FLOATS, level)
    while rest > 1:
        level += VECTOR_BYTES
        rest >>= 1
        if rest & 1:
            value = llvm.load(FLOATS, level) + value
    return value


@njit(inline="always")
def _all_are_there(this: Any, word: int) -> bool:
    """Wait for the parts of all ranks; a failure becomes the status of the pass."""
    for rank in range(this.size):
        status = exchange.await_rank(this, rank, word)
        if status != exchange.ARRIVED:
            llvm.store_word(this.status, status)
            return False
    return True


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
        elif step == WIDEN and llvm.itemsize(given.kind) == 4:
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
    per_step = STEP_BYTES // llvm.itemsize(given.kind)
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
        llvm.call(this.attend, (_attention(given, layer), item))
    elif step == _ROTATE:
        _rotate(given, layer, item)
    elif step in (_NORM_BEFORE_ATTENTION, _NORM_BEFORE_MLP, NORM_BEFORE_HEAD):
        _normalize(given, layer, step, item)
    elif step == WIDEN:
        scores = this.scores + item * this.vocab_size * llvm.itemsize(given.kind)
        logits = _address(given.logits) + item * this.vocab_size * 4
        llvm.call(this.widen, (given.kind, scores, logits, this.vocab_size))
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
        llvm.call(this.multiply_head, (given.head_kind, given.kind, product, *where))
    else:
        llvm.call(this.multiply, (given.weight_kind, given.kind, product, *where))


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
        llvm.call(this.rotate, (rotation, row))
    llvm.call(this.store, (_attention(given, index), row))


@njit(inline="always")
def _normalize(given: Any, index: int, step: int, row: int) -> None:
    """Initialize the hidden states of a row or add delta to them, then normalize them."""
    this, layer, size = given.passes[0], given.layers[index], given.passes[0].hidden_size
    hidden, delta, row_bytes = this.hidden, this.delta, size * llvm.itemsize(given.kind)
    weight, bias = layer.mlp_norm, layer.out_bias
    if _is_narrowed(given, index, step):
        hidden += (given.wanted[row] - row) * row_bytes
    if step == _NORM_BEFORE_ATTENTION:
        weight = layer.attention_norm
        delta = delta if index else np.int64(0)
        bias = given.layers[index - 1].down_bias if index else np.int64(0)
        if index == 0 and this.embedding:
            source = this.embedding + given.input_ids[row] * row_bytes
            target = this.hidden + row * row_bytes
            llvm.call(this.embed, (given.kind, source, this.embedding_multiplier, target, size))
    elif step == NORM_BEFORE_HEAD:
        weight, bias = this.final_norm, layer.down_bias
    if bias:
        _add_bias(given, delta, bias, row, size)
    norm = Norm(given.kind, hidden, delta, this.normed, weight, this.multiplier, this.eps, size)
    llvm.call(this.normalize, (norm, row))
    _sum_groups(given, this.normed, row, size)


@njit(inline="always")
def _add_bias(given: Any, out: int, bias: int, row: int, size: int) -> None:
    start = out + row * size * llvm.itemsize(given.kind)
    llvm.call(given.passes[0].add_bias, (given.kind, start, bias, size))


@njit(inline="always")
def _sum_groups(given: Any, inputs: int, row: int, num_inputs: int) -> None:
    this = given.passes[0]
    if this.sum_groups:
        groups = num_inputs * llvm.itemsize(given.kind) // STEP_BYTES // STEPS
        llvm.call(this.sum_groups, (inputs, this.sums, row, groups))
