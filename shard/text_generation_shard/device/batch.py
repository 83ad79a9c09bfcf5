"""The ragged inputs of one forward pass."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens


class RowBatch(NamedTuple):
    """One token of each of R rows of a table, where the table has it."""

    # [R] rows, and the positions of their tokens.
    rows: Ints
    starts: Ints
    # [*, width] what the table knows of all rows: token ids and block numbers.
    token_ids: Tokens
    block_tables: Ints


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows, one row after another, without padding. Frozen; lives for one pass.

    A row's tokens are its last ones: what it has before them is in the cache, or is written to it
    by an earlier row of the same pass.
    """

    # [T] token ids and their positions.
    input_ids: Tensor
    positions: Tensor
    # [T] length that decides the rope frequencies; None where the kind of rope asks for none.
    rope_lens: Tensor | None
    # [T] where each token's key and value go: block * block_size + offset.
    slots: Tensor
    # [R, width] block numbers, and [R] tokens each row sees, those of this pass counted in.
    block_tables: Tensor
    context_lens: Tensor
    # R + 1 offsets into the T tokens, and the values of context_lens, on the host.
    cu_seqlens_q: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    # [S] tokens whose logits are wanted; None: all of them.
    logits_indices: Tensor | None
    # Every row has exactly one token.
    is_decode: bool
