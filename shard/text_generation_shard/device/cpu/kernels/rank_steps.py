"""The phases of a pass: the steps of all layers, and with several ranks the exchanges between them.

An operation covers as many rows of a pass as fit into a slot. This rank's part is written to its
slot, and one item publishes it. The following items, one per row, wait for all ranks and combine
the parts. Exchanged are embeddings, which one rank has; float32 sums of `out` and `down`, which a
binary tree adds and which are rounded once; and the scores of each rank's part of the vocabulary.

`given` is a `layers.Given`, whose `PASS` has the fields of an exchange. A thread waits within an
item; meanwhile the other threads look for work and yield their cores. After a failed wait, the
remaining items of the pass do nothing, and `status` holds the reason. One rank exchanges nothing.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from text_generation_shard.device.cpu.kernels import exchange, llvm, steps, vector
from text_generation_shard.device.cpu.kernels.grouped import STEPS, sums_bytes
from text_generation_shard.device.cpu.kernels.llvm import FLOATS, LANES, VECTOR_BYTES
from text_generation_shard.device.cpu.kernels.product import ROWS_AT_ONCE, Product
from text_generation_shard.device.cpu.kernels.thread_pool import may_store
from text_generation_shard.device.cpu.kernels.vector import FLOAT32, STEP_BYTES

# Steps after those of `steps`.
_EMBED: Final = 13
_PUBLISH: Final = 14
_TAKE_VECTORS: Final = 15
_TAKE_SUMS: Final = 16
_TAKE_SCORES: Final = 17
# Levels of the tree of sums; bounds the number of ranks.
_LEVELS: Final = 16


def num_operations(this: Any, rows: int, wanted: int, num_logits: int, num_layers: int) -> int:
    """Number of operations of a pass of `rows` tokens, `wanted` of which have last hidden states
    and `num_logits` logits. this: a `layers.PASS`."""
    number_bytes = int(this["row_itemsize"])
    vectors = _num_chunks(this, rows, int(this["hidden_size"]) * number_bytes)
    sums = [_num_chunks(this, count, int(this["hidden_size"]) * 4) for count in (rows, wanted)]
    scores = _num_chunks(this, num_logits, int(this["vocab_size"]) * number_bytes)
    return vectors + 2 * ((num_layers - 1) * sums[0] + sums[1]) + scores


def _num_chunks(this: Any, rows: int, row_bytes: int) -> int:
    rows_at_once = int(this["slot_bytes"]) // row_bytes
    assert rows_at_once > 0, "a slot has room for a row"
    return -(-rows // rows_at_once)


@njit(inline="always")
def write_phases(given: Any, phases: Any) -> None:
    """Write the phases of all layers, final norm and head, with the exchanges of several ranks."""
    # No literals as arguments: numba compiles a function again for each literal.
    end, last = np.int64(0), len(given.layers) - 1
    word, has_ranks = np.int64(given.passes[0].word), given.passes[0].size > 1
    if has_ranks:
        end, word = _write_operations(given, phases, end, word, np.int64(0), np.int64(_EMBED))
    for layer in range(len(given.layers)):
        for step in range(steps.NUM_STEPS):
            if has_ranks and step in (steps.OUT, steps.DOWN):
                end, word = _write_operations(given, phases, end, word, layer, step)
            else:
                end = steps.write_step(given, phases, end, layer, step)
    end = steps.write_step(given, phases, end, last, np.int64(steps.NORM_BEFORE_HEAD))
    if len(given.logits) and has_ranks:
        end, word = _write_operations(given, phases, end, word, last, np.int64(steps.HEAD))
    elif len(given.logits):
        for step in range(steps.HEAD, steps.WIDEN + 1):
            end = steps.write_step(given, phases, end, last, step)


@njit
def _write_operations(
    given: Any, phases: Any, end: int, word: int, layer: int, step: int
) -> tuple[int, int]:
    """Append the phases of a step with an exchange; returns the number of phases, and the word of
    the next operation."""
    this = given.passes[0]
    rows = len(given.slots) if step == _EMBED else steps.num_rows(given, layer, step)
    row_bytes, take = this.hidden_size * 4, _TAKE_SUMS
    if step == _EMBED:
        row_bytes, take = this.hidden_size * llvm.itemsize(given.kind), _TAKE_VECTORS
    elif step == steps.HEAD:
        row_bytes, take = this.vocab_size * llvm.itemsize(given.kind), _TAKE_SCORES
    chunk = this.slot_bytes // row_bytes
    for begin in range(0, rows, chunk):
        count = min(rows - begin, chunk)
        for first in range(0, count, count if step == _EMBED else ROWS_AT_ONCE):
            phase = phases[end]
            _note_operation(phase, step, layer, word, begin, count)
            phase.first, phase.items = first, count
            if step != _EMBED:
                steps.note_product(given, phase, _partial_product(given, phase))
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
    this, whole = given.passes[0], steps.product_of(given, phase.layer, phase.step)
    beside = whole.beside
    if this.sum_groups and phase.step != steps.HEAD:
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
        phase.step != steps.HEAD,
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
        steps.compute_step(given, now, item, ticket)
    elif now.weights:
        steps.multiply(given, now, _partial_product(given, now), item, ticket)
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
    own, row_bytes = (
        given.input_ids[row] - this.first_token,
        this.hidden_size * llvm.itemsize(given.kind),
    )
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
    """Add the parts of all ranks by a binary tree, as `product.add_part` does: a level holds the
    sum of 2 ** level ranks that waits for its neighbour."""
    for rank in range(this.size):
        value, level, rest = _part(this, rank, word, at, count), levels, rank
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


@vector.inlined
def _part(this: Any, rank: int, word: int, at: int, count: int) -> Any:
    return vector.load_numbers(FLOAT32, exchange.slot(this, rank, word) + at, count)


@njit(inline="always")
def _all_are_there(this: Any, word: int) -> bool:
    """Wait for the parts of all ranks; a failure becomes the status of the pass."""
    for rank in range(this.size):
        status = exchange.await_rank(this, rank, word)
        if status != exchange.ARRIVED:
            llvm.store_word(this.status, status)
            return False
    return True
