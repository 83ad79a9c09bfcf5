"""Row state on the device, so that the host sends only changes to each pass."""

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens, Upload
from text_generation_shard.device import base


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
