"""The inputs of attention: head shape and rows of a pass."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Upload
from text_generation_shard.device.forward import ForwardBatch


class HeadShape(NamedTuple):
    """Shape and scale of a model's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Scores are multiplied by `scale`, then limited: soft_cap * tanh(score / soft_cap); 0: no
    # limit.
    scale: float
    soft_cap: float = 0.0


class Rows(NamedTuple):
    """Rows with one token each."""

    # [R, width] and [R], int32; lens: tokens that each row sees, including its own.
    tables: Tensor
    lens: Tensor
    longest_context: int
    # [R] int32: index of each row's block table; None: its own.
    owners: Tensor | None = None

    @classmethod
    def of_tokens(cls, upload: Upload, batch: ForwardBatch, tables: Tensor) -> Self:
        """Each token of a pass as a row of its own, with the block table of the token's row."""
        if batch.is_decode:
            owners = torch.arange(len(tables), dtype=torch.int32, device=tables.device)
        else:
            counts = np.diff(batch.cu_seqlens_q)
            (owners,) = upload([np.repeat(np.arange(len(counts), dtype=np.int32), counts)])
        lens = (batch.positions + 1).int()
        return cls(tables, lens, max(batch.host_context_lens), owners)

    def part(self, some: slice) -> Self:
        """A slice of the rows."""
        lens = self.lens[some]
        if self.owners is None:
            return self._replace(tables=self.tables[some], lens=lens)
        return self._replace(lens=lens, owners=self.owners[some])


class Prompts(NamedTuple):
    """Rows with several tokens, one row after another."""

    # See Rows.
    tables: Tensor
    lens: Tensor
    # [R + 1] int32: offsets of each row's tokens, and of its keys if gathered.
    starts: Tensor
    key_starts: Tensor
    # Number of all keys; most tokens and most keys of a row.
    num_keys: int
    longest: int
    longest_context: int

    @classmethod
    def of(
        cls,
        upload: Upload,
        tables: Tensor,
        lens: Tensor,
        contexts: Sequence[int],
        counts: Sequence[int],
    ) -> Self:
        """From block tables and lens on the device, and lens (`contexts`) and token counts on the
        host."""
        both = [accumulate(values, initial=0) for values in (counts, contexts)]
        own, keys = upload([np.fromiter(values, np.int32) for values in both])
        return cls(tables, lens, own, keys, sum(contexts), max(counts), max(contexts))
