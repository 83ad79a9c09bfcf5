"""All layers of a model in one call: a program of phases that a pool of threads goes through.

Why it is fast: called one after another from Python, the kernels of a layer and the allocations
between them cost 1.3 to 1.8 ms of a decode step of the 125 M checkpoint; from here they cost next
to nothing, and the interpreter is free for other threads meanwhile. What lies between two phases:
see `thread_pool`. The kernels are the same as elsewhere, and so are the numbers.
"""

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numba import float32, from_dtype, int64, njit, uint8

from text_generation_shard.device.cpu.kernels import attention, exchange, pointwise
from text_generation_shard.device.cpu.kernels.grouped_linear import (
    GROUP,
    multiply_grouped_item,
    sum_groups,
)
from text_generation_shard.device.cpu.kernels.linear import item_signature, multiply_item
from text_generation_shard.device.cpu.kernels.llvm import address_of, call, itemsize
from text_generation_shard.device.cpu.kernels.part_products import (
    multiply_grouped_parts_item,
    multiply_parts_item,
)
from text_generation_shard.device.cpu.kernels.rank_steps import (
    compute_rank_item,
    write_rank_phases,
)
from text_generation_shard.device.cpu.kernels.steps import compute_item, num_phases, write_phases
from text_generation_shard.device.cpu.kernels.structs import (
    Address,
    Count,
    IntRows,
    Ints,
    RealRows,
    struct_type,
)
from text_generation_shard.device.cpu.kernels.thread_pool import PHASE, PHASES, go_through

FIELDS: Final = {
    "attention_norm": "address: weights of the norm before attention, [hidden_size] float32",
    "qkv": "address: packed weight of queries, keys and values, one behind the other",
    "qkv_scales": "address: what is beside that weight, see Product; 0: nothing",
    "qkv_bias": "address: what is added to its products, in the kind of the rows; 0: nothing",
    "query_norm": "address: weights of the norm of each query, [head_dim] float32; 0: it has none",
    "key_norm": "address: likewise of each key",
    "out": "address: packed weight behind attention",
    "out_scales": "as qkv_scales",
    "out_bias": "as qkv_bias",
    "mlp_norm": "address: weights of the norm before the feed-forward, [hidden_size] float32",
    "gate_up": "address: packed weight of gates, and of what they let through, see GatedWeight",
    "gate_up_scales": "as qkv_scales",
    "down": "address: packed weight behind the gates",
    "down_scales": "as qkv_scales",
    "down_bias": "as qkv_bias",
    "is_rotated": "whether queries and keys are rotated by positions",
    "window": "tokens that a query sees, itself counted in; 0: all",
}
LAYER: Final = np.dtype([(name, np.int64) for name in FIELDS])
"""What is a layer's own."""
LAYERS: Final = from_dtype(LAYER)[::1]

CODES: Final = {
    "item": "of `compute_item`",
    "multiply": "of what multiplies with the weights of the layers",
    "multiply_inputs": "of what multiplies with those whose inputs ranks share: out and down",
    "multiply_head": "of what multiplies with the weights of the head",
    "sum_groups": "of `sum_groups`; 0 where the weights do not ask for it",
    "embed": "of `scale_row`",
    "normalize": "of `normalize_row`",
    "rotate": "of `rotate_row`",
    "store": "of `store_token`",
    "attend": "of `attend_task`",
    "add_bias": "of `add_bias`",
    "widen": "of `widen_row`",
    "own_item": "of several ranks: of `compute_item`, where `item` is of `compute_rank_item`",
    "write_phases": "of several ranks: of `write_rank_phases`",
}
"""Where the functions lie that compute items, see `llvm.call`."""
SIZES: Final = {
    "hidden_size": "numbers of a hidden state",
    "inner_size": "numbers inside the feed-forward",
    "num_heads": "query heads",
    "num_kv_heads": "heads of keys and of values",
    "head_dim": "features of a head",
    "half": "of the features of a head, half of those that are rotated",
    "out_parts": "in which sums behind attention are taken, see `part_products`",
    "down_parts": "likewise those behind the gates",
}
"""What the layers have alike, of what a rank has of them."""
OTHERS: Final = {
    "board": "address: where threads tell each other what is done, see `thread_pool`",
    "embedding": "address: the tokens' vectors, [vocab_size, hidden_size]; 0: the hidden states "
    "are given",
    "head": "address: packed weight of the head; 0: others make the logits",
    "head_scales": "as qkv_scales",
    "final_norm": "address: weights of the norm before the head, [hidden_size] float32",
    "vocab_size": "tokens that the head scores",
}
"""What lies before and behind the layers, of what a rank has of them."""
OF_RANKS: Final = exchange.FIELDS | {
    "first_token": "that this rank has the vector of, and scores",
    "vectors": "address: of several ranks, the vectors of this one's tokens; 0: those are given as "
    "hidden states",
    "row_itemsize": "bytes of a number of rows",
    "word": "of the first operation of a pass, see `rank_steps`",
    "num_words": "how many operations it has",
    "status": "address: a word for why waiting for a rank failed, 0 before",
}
"""Of several ranks; else 0."""
CONSTANTS: Final = {
    "embedding_multiplier": "of the tokens' vectors",
    "attention_scale": "of queries",
    "eps": "added to the mean of squares in norms",
    "multiplier": "of what attention and the feed-forward add to hidden states",
}
"""float32."""
CHANGING: Final = {
    "hidden": "address: [T, hidden_size] hidden states",
    "normed": "address: [T, hidden_size] those normalised",
    "delta": "address: [T, hidden_size] what a block adds to them",
    "heads": "address: [T, num_heads + 2 * num_kv_heads, head_dim] queries, keys and values",
    "attended": "address: [T, num_heads * head_dim] what attention makes of them",
    "inner": "address: [T, inner_size] the feed-forward's inside",
    "sums": "address: for weights of 4 bits, sums of their inputs, see `sum_groups`",
    "scores": "address: [S, vocab_size] logits of the rows' kind",
}
"""Set by `run_layers`: where the rows of a pass lie."""
PASS: Final = np.dtype(
    [(name, np.int64) for name in (*CHANGING, *CODES, *SIZES, *OTHERS, *OF_RANKS)]
    + [(name, np.float32) for name in CONSTANTS]
)
"""What a pass is computed from, beside its tokens."""


class Given(NamedTuple):
    """What a pass takes T tokens through all layers with."""

    # Markers of the weights of the layers, of those of the head, which are never INT4, and of rows.
    weight_kind: Any
    head_kind: Any
    kind: Any
    # [1] and [num_layers].
    passes: Annotated[Any, from_dtype(PASS)[::1]]
    layers: Annotated[Any, LAYERS]
    # [T, hidden_size], contiguous; uninitialized on entry if there is an embedding. 0: nobody asks
    # for them.
    hidden: Address
    # [positions, 2, half] float32: see `pointwise.Rotation`.
    angles: Address
    # Blocks of the first layer, see `attention.Attention`; from one layer's to the next one's; and
    # how many a layer has for a KV head.
    cache: Address
    layer_bytes: Count
    num_blocks: Count
    # [T] token ids, and which of the angles rotate each.
    input_ids: Ints
    positions: Ints
    # [T], [R, width] and [N, 5]: see `attention`.
    slots: Ints
    block_tables: IntRows
    tasks: IntRows
    # [S] the tokens whose last hidden states are wanted, in their order. Of fewer than T there are
    # tasks [M, 6] for these alone, last in each by how much earlier its results are put.
    wanted: Ints
    last_tasks: IntRows
    # [S, vocab_size]; [0, 0]: they are not wanted.
    logits: RealRows


Kernels = dict[str, tuple[Any, tuple[Any, ...]]]


def kernels(weight_kind: Any, kind: Any, has_parts: bool = False) -> Kernels:
    """What CODES names but the items themselves, and what each takes, for weights and rows of
    these types; what takes longest to compile first. has_parts: see `codes`."""
    is_grouped = weight_kind == uint8
    multiply = multiply_grouped_item if is_grouped else multiply_item
    found: Kernels = {
        "attend": (attention.attend_task, attention.task_signature(kind)),
        "multiply": (multiply, item_signature(weight_kind, kind)),
        "rotate": (pointwise.rotate_row, (kind, pointwise.ROTATION, int64, int64)),
        "store": (attention.store_token, (kind, attention.ATTENTION, int64, int64)),
        "normalize": (pointwise.normalize_row, (kind, pointwise.NORM, int64)),
        "add_bias": (pointwise.add_bias, (kind, int64, int64, int64)),
        "embed": (pointwise.scale_row, (kind, int64, float32, int64, int64)),
        "widen": (pointwise.widen_row, (kind, int64, int64, int64)),
    }
    if has_parts:
        by_parts = multiply_grouped_parts_item if is_grouped else multiply_parts_item
        found["multiply_inputs"] = by_parts, item_signature(weight_kind, kind)
    if is_grouped:
        found["sum_groups"] = sum_groups, (int64,) * 4
    return found


def codes(
    weight_kind: Any, head_kind: Any, kind: Any, has_parts: bool, has_ranks: bool
) -> dict[str, int]:
    """CODES for weights of the layers, those of the head, and rows of these types; compiled if need
    be. has_parts: sums over inputs that ranks share are taken in parts, or left to be added to
    those of other ranks; has_ranks: there are some."""
    of_kinds = kernels(weight_kind, kind, has_parts)
    found = {name: address_of(*kernel) for name, kernel in of_kinds.items()}
    found |= {"sum_groups": 0, "multiply_inputs": found["multiply"]} | found
    found["multiply_head"] = address_of(multiply_item, item_signature(head_kind, kind))
    own = signature_of_item(weight_kind, head_kind, kind)
    found |= {"item": address_of(compute_item, own), "own_item": 0, "write_phases": 0}
    if has_ranks:
        found["own_item"] = found["item"]
        found["item"] = address_of(compute_rank_item, own)
        found["write_phases"] = address_of(write_rank_phases, own[:2])
    return found


def signature(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Of `run_layers`, for the same types."""
    given = struct_type(Given, weight_kind=weight_kind, head_kind=head_kind, kind=kind)
    return given, uint8[::1], int64


def signature_of_item(weight_kind: Any, head_kind: Any, kind: Any) -> tuple[Any, ...]:
    """Of `compute_item`, likewise."""
    given, _, _ = signature(weight_kind, head_kind, kind)
    return given, PHASES, int64, int64, int64


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def run_layers(given: Given, memory: Any, num_threads: int) -> int:
    """Take T tokens through all layers; what the last one adds is taken in by the hidden states
    that are wanted, and the head makes logits of them if there is room for such. Of tokens that are
    not wanted the last layer computes keys and values, and nothing else.

    memory: bytes for the buffers of the pass; returns how many it takes, and where there are less,
    nothing else is done.
    """
    this, logits = given.passes[0], given.logits
    this.hidden = given.hidden
    # Scores of float32 are logits already.
    is_widened = len(logits) > 0 and itemsize(given.kind) < 4
    sizes = _buffer_sizes(given.kind, this, len(given.slots), len(logits) if is_widened else 0)
    needed: int = _LINE_BYTES + sum(sizes)
    if len(memory) < needed:
        return needed
    _place_buffers(this, sizes, _lines(np.int64(memory.ctypes.data)))
    if not is_widened:
        this.scores = np.int64(logits.ctypes.data)
    # An operation of ranks is cut into its own phases, publishes, and takes what is there.
    phases = np.zeros(num_phases(given) + 4 * this.num_words, PHASE)
    if this.write_phases:
        call(this.write_phases, (given, phases))
    else:
        write_phases(given, phases)
    go_through(this.item, given, phases, this.board, num_threads)
    return needed


_LINE_BYTES: Final = 64
# Of a row that weights of 4 bits are multiplied with, for two numbers of the buffer of sums.
_NUMBERS_PER_PAIR: Final = 2 * GROUP


@njit
def _buffer_sizes(kind: Any, this: Any, rows: int, num_logits: int) -> Any:
    """Bytes of hidden states, if nobody gives them, and of the buffers behind them in CHANGING:
    whole cache lines."""
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
    """Up to whole cache lines."""
    return -(-count // _LINE_BYTES) * _LINE_BYTES


@njit
def _place_buffers(this: Any, sizes: Any, start: int) -> None:
    """One behind the other."""
    if sizes[0]:
        this.hidden = start
    this.normed = start + sizes[0]
    this.delta = this.normed + sizes[1]
    this.heads = this.delta + sizes[2]
    this.attended = this.heads + sizes[3]
    this.inner = this.attended + sizes[4]
    this.sums = this.inner + sizes[5]
    this.scores = this.sums + sizes[6]
