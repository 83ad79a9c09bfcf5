"""Where the rows of a pass lie while it goes through the layers: one buffer behind the other."""

from typing import Any, Final

import numpy as np
from numba import njit

from text_generation_shard.device.cpu.kernels.grouped import GROUP
from text_generation_shard.device.cpu.kernels.vector import itemsize

LINE_BYTES: Final = 64
# Of a row that weights of 4 bits are multiplied with, for two numbers of the buffer of sums.
_NUMBERS_PER_PAIR: Final = 2 * GROUP


@njit
def buffer_sizes(kind: Any, this: Any, rows: int, num_logits: int) -> Any:
    """Bytes of hidden states, if nobody gives them, and of the buffers behind them in CHANGING:
    whole cache lines."""
    attended = this.num_heads * this.head_dim
    width = attended + 2 * this.num_kv_heads * this.head_dim
    widest = max(this.hidden_size, attended, this.inner_size)
    row = rows * itemsize(kind)
    return (
        np.int64(0) if this.hidden else lines(row * this.hidden_size),
        lines(row * this.hidden_size),
        lines(row * this.hidden_size),
        lines(row * width),
        lines(row * attended),
        lines(row * this.inner_size),
        lines(row * 2 * -(-widest // _NUMBERS_PER_PAIR)) if this.sum_groups else np.int64(0),
        lines(num_logits * itemsize(kind) * this.vocab_size),
    )


@njit
def lines(count: int) -> int:
    """Up to whole cache lines."""
    return -(-count // LINE_BYTES) * LINE_BYTES


@njit
def place_buffers(this: Any, sizes: Any, start: int) -> None:
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
