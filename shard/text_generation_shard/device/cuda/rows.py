"""The rows of a pass on a GPU: inputs of attention, and the columns kept there."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens, Upload
from text_generation_shard.device import base
from text_generation_shard.device.forward import ForwardBatch


class DeviceRows:
    """Owns the device's copy of each row's last token and block table.

    Both have one additional row, which belongs to no request. All its blocks are the spare block of
    the cache.
    """

    def __init__(self, rows: base.Rows, device: torch.device, upload: Upload) -> None:
        """`rows`: the row state on the host."""
        self.rows = rows
        capacity, width = rows.block_tables.shape
        self.last_tokens = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        self.tables = torch.zeros(capacity + 1, width, dtype=torch.int32, device=device)
        self.tables[capacity] = rows.num_cache_blocks
        self._upload = upload
        # The part of each row's table that is on the device: request number and number of blocks.
        self._takes: Ints = np.zeros(capacity, dtype=np.int64)
        self._counts: Ints = np.zeros(capacity, dtype=np.int64)

    def send(self, used: Ints) -> None:
        """Send the new entries of the block tables that a pass uses."""
        rows = self.rows
        is_same = self._takes[used] == rows.num_takes[used]
        first = np.where(is_same, self._counts[used], 0)
        counts = rows.num_blocks[used] - first
        if not counts.any():
            return
        own = np.repeat(used, counts)
        at = base.last_ones(rows.num_blocks[used], counts)
        blocks: Tokens = rows.block_tables[own, at].astype(np.int32)
        places, values = self._upload([own * self.tables.shape[1] + at, blocks])
        self.tables.view(-1).index_copy_(0, places, values)
        # Only after the copy, which may have failed for lack of memory.
        self._takes[used], self._counts[used] = rows.num_takes[used], rows.num_blocks[used]

    def tables_of(self, rows: Ints, longest: int) -> Tensor:
        """Block tables [R, width] of `rows`, wide enough for a context of `longest` tokens."""
        (places,) = self._upload([rows])
        return self.narrow(longest).index_select(0, places)

    def narrow(self, longest: int) -> Tensor:
        """`tables`, narrowed to the width of a context of `longest` tokens."""
        return self.tables[:, : -(-longest // self.rows.block_size)]


class HeadShape(NamedTuple):
    """Shape and scale of a model's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Scores are multiplied by `scale`.
    scale: float


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
