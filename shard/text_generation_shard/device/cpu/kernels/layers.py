"""All layers of a model in one call: a program of phases for a thread pool.

Why it is fast: it avoids the calls from Python and the allocations between kernels, and other
threads can use the interpreter meanwhile. See `thread_pool` for the transition between phases. The
kernels, and so the results, are the same as in calls from Python.
"""

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numba import float32, from_dtype, int32, int64, njit, uint8

from text_generation_shard.device.cpu.kernels import (
    Address,
    Count,
    IntRows,
    Ints,
    RealRows,
    attention,
    exchange,
    pointwise,
    struct_type,
)
from text_generation_shard.device.cpu.kernels.llvm import address_of, itemsize
from text_generation_shard.device.cpu.kernels.multiply import (
    GROUP,
    multiply_item,
    multiply_signature,
    sum_groups,
)
from text_generation_shard.device.cpu.kernels.steps import (
    NUM_PRODUCTS,
    NUM_STEPS,
    compute_item,
    write_phases,
)
from text_generation_shard.device.cpu.kernels.thread_pool import (
    PHASE,
    PHASES,
    item_signature,
    run_phases,
)
from text_generation_shard.device.cpu.kernels.tile import ROWS_AT_ONCE

FIELDS: Final = {
    "attention_norm": "address: weights of the norm before attention, [hidden_size] float32",
    "qkv": "address: packed weight of queries, keys and values, concatenated",
    "qkv_scales": "address: `Product.beside` of that weight; 0: none",
    "qkv_bias": "address: bias of that product, in the kind of the rows; 0: none",
    "query_norm": "address: weights of the norm of each query, [head_dim] float32; 0: none",
    "key_norm": "address: the same for each key",
    "out": "address: packed weight of the attention output",
    "out_scales": "as qkv_scales",
    "out_bias": "as qkv_bias",
    "mlp_norm": "address: weights of the norm before the feed-forward, [hidden_size] float32",
    "gate_up": "address: packed weight of gates and ups, see PackedWeight",
    "gate_up_scales": "as qkv_scales",
    "down": "address: packed weight after the gates",
    "down_scales": "as qkv_scales",
    "down_bias": "as qkv_bias",
    "is_rotated": "whether queries and keys are rotated",
    "window": "tokens that a query sees, including itself; 0: all",
}
LAYER: Final = np.dtype([(name, np.int64) for name in FIELDS])
"""The fields of a layer."""
LAYERS: Final = from_dtype(LAYER)[::1]

CODES: Final = {
    "item": "of `compute_item`",
    "multiply": "of the product with weights of the layers",
    "multiply_head": "of the product with the head",
    "sum_groups": "of `sum_groups`; 0: the weights do not need it",
    "embed": "of `scale_row`",
    "normalize": "of `normalize_row`",
    "rotate": "of `rotate_row`",
    "store": "of `store_token`",
    "attend": "of `attend_task`",
    "add_bias": "of `add_bias`",
    "widen": "of `widen_row`",
}
"""Addresses of the functions that compute items, see `llvm.call`."""
SIZES: Final = {
    "hidden_size": "features of a hidden state",
    "inner_size": "features inside the feed-forward",
    "num_heads": "query heads",
    "num_kv_heads": "heads of keys and of values",
    "head_dim": "features of a head",
    "half": "half the number of rotated features of a head",
    "out_parts": "parts of the sums of `out`, see `tile.num_parts`",
    "down_parts": "parts of the sums of `down`",
}
"""The rank's sizes, shared by all layers."""
OTHERS: Final = {
    "board": "address: shared state of the threads, see `thread_pool`",
    "embedding": "address: embeddings, [vocab_size, hidden_size]; 0: `hidden` is the input",
    "head": "address: packed weight of the head; 0: logits are computed elsewhere",
    "head_scales": "as qkv_scales",
    "final_norm": "address: weights of the norm before the head, [hidden_size] float32",
    "vocab_size": "tokens of the head",
    "status": "address of a status word: why waiting for a rank failed, initially 0",
}
"""The rank's fields of embedding and head."""
OF_RANKS: Final = exchange.FIELDS | {
    "first_token": "first token of this rank's part of the vocabulary",
    "vectors": "address: embeddings of this rank's tokens; 0: `hidden` has them",
    "row_itemsize": "bytes of a row's element",
    "word": "word of the first operation of a pass, see `steps`",
    "num_words": "operations of the pass",
}
"""For several ranks; else 0."""
CONSTANTS: Final = {
    "embedding_multiplier": "factor of embeddings",
    "attention_scale": "factor of queries",
    "eps": "added to the mean of squares in norms",
    "multiplier": "factor of what attention and feed-forward add to hidden states",
}
"""float32."""
CHANGING: Final = {
    "hidden": "address: [T, hidden_size] hidden states",
    "normed": "address: [T, hidden_size] normalized hidden states",
    "delta": "address: [T, hidden_size] output of attention or feed-forward",
    "heads": "address: [T, num_heads + 2 * num_kv_heads, head_dim] queries, keys and values",
    "attended": "address: [T, num_heads * head_dim] results of attention",
    "inner": "address: [T, inner_size] results of the gates",
    "sums": "address: input sums for int4 weights, see `sum_groups`",
    "scores": "address: [S, vocab_size] logits in the rows' kind",
}
"""Buffers of a pass, set by `run_layers`."""
PASS: Final = np.dtype(
    [(name, np.int64) for name in (*CHANGING, *CODES, *SIZES, *OTHERS, *OF_RANKS)]
    + [(name, np.float32) for name in CONSTANTS]
)
"""All fields of a pass, except its tokens."""


class Given(NamedTuple):
    """The inputs of a pass of T tokens."""

    # Markers of the layers' weights, of the head (never INT4), and of rows.
    weight_kind: Any
    head_kind: Any
    kind: Any
    # [1] and [num_layers].
    passes: Annotated[Any, from_dtype(PASS)[::1]]
    layers: Annotated[Any, LAYERS]
    # [T, hidden_size], contiguous; uninitialized on entry if there is an embedding. 0: not needed.
    hidden: Address
    # [positions, 2, half] float32: see `pointwise.Rotation`.
    angles: Address
    # Blocks of the first layer, see `attention.Attention`; bytes per layer; blocks per KV head and
    # layer.
    cache: Address
    layer_bytes: Count
    num_blocks: Count
    # [T] token ids, and [T] rows of `angles`.
    input_ids: Ints
    positions: Ints
    # [T], [R, width] and [N, 6]: see `attention.Attention`.
    slots: Ints
    block_tables: IntRows
    tasks: IntRows
    # [S] tokens whose last hidden states are wanted, in order. If S < T, tasks [M, 6] of these
    # tokens.
    wanted: Ints
    last_tasks: IntRows
    # [S, vocab_size]; [0, 0]: not wanted.
    logits: RealRows


Kernels = dict[str, tuple[Any, tuple[Any, ...]]]


def kernels(weight_kind: Any, kind: Any) -> Kernels:
    """Functions and signatures of CODES, except those of items, for weights and rows of these
    types; slowest to compile first."""
    norm, rotation, heads = (
        item_signature(struct, kind)
        for struct in (pointwise.Norm, pointwise.Rotation, attention.Attention)
    )
    found: Kernels = {
        "attend": (attention.attend_task, heads),
        "multiply": (multiply_item, multiply_signature(weight_kind, kind)),
        "rotate": (pointwise.rotate_row, rotation),
        "store": (attention.store_token, heads),
        "normalize": (pointwise.normalize_row, norm),
        "add_bias": (pointwise.add_bias, (kind, int64, int64, int64)),
        "embed": (pointwise.scale_row, (kind, int64, float32, int64, int64)),
        "widen": (pointwise.widen_row, (kind, int64, int64, int64)),
    }
    if weight_kind == uint8:
        found["sum_groups"] = sum_groups, (int64,) * 4
    return found


def codes(weight_kind: Any, head_kind: Any, kind: Any) -> dict[str, int]:
    """CODES for these types of layers' weights, head and rows; compiles them if necessary."""
    of_kinds = kernels(weight_kind, kind)
    found = {name: address_of(*kernel) for name, kernel in of_kinds.items()}
    found.setdefault("sum_groups", 0)
    found["multiply_head"] = address_of(multiply_item, multiply_signature(head_kind, kind))
    item = signature_of_item(weight_kind, head_kind, kind)
    return found | {"item": address_of(compute_item, item)}


def signature(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Signature of `run_layers`, for the same types."""
    given = struct_type(Given, weight_kind=weight_kind, head_kind=head_kind, kind=kind)
    return given, uint8[::1], int64


def signature_of_item(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Signature of `compute_item`, for the same types."""
    given, _, _ = signature(weight_kind, head_kind, kind)
    return given, PHASES, int64, int64, int64


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def run_layers(given: Given, memory: Any, num_threads: int) -> int:
    """Compute all layers for T tokens, then the final hidden states of wanted tokens, and their
    logits if requested. For the other tokens, the last layer computes only keys and values.

    memory: bytes for the buffers of the pass. Returns how many bytes it needs; with fewer, it does
    nothing else.
    """
    this, logits = given.passes[0], given.logits
    this.hidden = given.hidden
    # float32 scores need no conversion to logits.
    is_widened = len(logits) > 0 and itemsize(given.kind) < 4
    sizes = _buffer_sizes(given.kind, this, len(given.slots), len(logits) if is_widened else 0)
    needed: int = _LINE_BYTES + sum(sizes)
    if len(memory) < needed:
        return needed
    _place_buffers(this, sizes, _lines(np.int64(memory.ctypes.data)))
    if not is_widened:
        this.scores = np.int64(logits.ctypes.data)
    # Each operation of ranks adds at most four phases.
    phases = np.zeros(_num_phases(given) + 4 * this.num_words, PHASE)
    write_phases(given, phases)
    run_phases(this.item, given, phases, this.board, num_threads)
    return needed


_LINE_BYTES: Final = 64
# Inputs of a row per pair of group sums.
_NUMBERS_PER_PAIR: Final = 2 * GROUP


@njit
def _buffer_sizes(kind: Any, this: Any, rows: int, num_logits: int) -> Any:
    """Bytes of the buffers in CHANGING, in whole cache lines; 0 for hidden states that are an
    input."""
    attended = this.num_heads * this.head_dim
    width = attended + 2 * this.num_kv_heads * this.head_dim
    widest = max(this.hidden_size, attended, this.inner_size)
    row = rows * itemsize(kind)
    return (
        np.int64(0) if this.hidden else _lines(row * this.hidden_size),
        _lines(row * this.hidden_size),
        _lines(row * this.hidden_size),
        _lines(row * width),
        _lines(row * attended),
        _lines(row * this.inner_size),
        _lines(row * 2 * -(-widest // _NUMBERS_PER_PAIR)) if this.sum_groups else np.int64(0),
        _lines(num_logits * itemsize(kind) * this.vocab_size),
    )


@njit
def _lines(count: int) -> int:
    """Round up to whole cache lines."""
    return -(-count // _LINE_BYTES) * _LINE_BYTES


@njit
def _place_buffers(this: Any, sizes: Any, start: int) -> None:
    """Place the buffers one after another."""
    if sizes[0]:
        this.hidden = start
    this.normed = start + sizes[0]
    this.delta = this.normed + sizes[1]
    this.heads = this.delta + sizes[2]
    this.attended = this.heads + sizes[3]
    this.inner = this.attended + sizes[4]
    this.sums = this.inner + sizes[5]
    this.scores = this.sums + sizes[6]


@njit(inline="always")
def _num_phases(given: Any) -> int:
    """Most phases of a pass."""
    blocks = -(-len(given.slots) // ROWS_AT_ONCE)
    count = len(given.layers) * (NUM_STEPS + NUM_PRODUCTS * (blocks - 1)) + 1
    return count + (blocks + 1 if len(given.logits) else 0)


def num_operations(this: Any, rows: int, wanted: int, num_logits: int, num_layers: int) -> int:
    """Number of operations of a pass of `rows` tokens, `wanted` of which have last hidden states
    and `num_logits` logits. this: a PASS."""
    number_bytes = int(this["row_itemsize"])
    vectors = _num_chunks(this, rows, int(this["hidden_size"]) * number_bytes)
    sums = [_num_chunks(this, count, int(this["hidden_size"]) * 4) for count in (rows, wanted)]
    scores = _num_chunks(this, num_logits, int(this["vocab_size"]) * number_bytes)
    return vectors + 2 * ((num_layers - 1) * sums[0] + sums[1]) + scores


def _num_chunks(this: Any, rows: int, row_bytes: int) -> int:
    rows_at_once = int(this["slot_bytes"]) // row_bytes
    assert rows_at_once > 0, "a slot has room for a row"
    return -(-rows // rows_at_once)


PLANNED: Final = (int64[::1], int64[::1], int32[:, ::1], int64[:, ::1], int64, int64)
"""Signature of `plan_rows`."""


@njit(cache=True, boundscheck=False)
def plan_rows(
    rows: Any, starts: Any, token_ids: Any, block_tables: Any, group: int, num_threads: int
) -> Any:
    """Plan a decode pass of the tokens at `starts` [R] of `rows` [R]: ids [R], slots [R], and tasks
    [N, 6], whose rows are those of block_tables; group: query heads per KV head.

    Why it is fast: between two steps the caches are cold, and one compiled call replaces two dozen
    numpy operations. It holds the GIL, because the event loop would keep it for longer than this
    takes.
    """
    input_ids, slots = np.empty_like(rows), np.empty_like(rows)
    for index in range(len(rows)):
        row, start = rows[index], starts[index]
        input_ids[index] = token_ids[row, start]
        block = block_tables[row, start // attention.BLOCK_SIZE]
        slots[index] = block * attention.BLOCK_SIZE + start % attention.BLOCK_SIZE
    parts = -(-group // attention.TASK_ROWS)
    tasks = np.empty((len(rows) * parts, attention.TASK_FIELDS), np.int64)
    # From the longest, the tasks are dealt to the threads' contiguous parts in turn.
    order = np.argsort(-starts, kind="mergesort")
    count = 0
    for thread in range(num_threads):
        for index in range(thread, len(tasks), num_threads):
            row, task = order[index // parts], tasks[count]
            task[0], task[1], task[2] = rows[row], row, starts[row]
            task[3], task[4], task[5] = index % parts * attention.TASK_ROWS, group, 0
            count += 1
    return input_ids, slots, tasks
