"""What a device knows of all rows, so that a pass is told of the host only what is new."""

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens, Upload
from text_generation_shard.device import base


class DeviceRows:
    """Owns, on a device, the token that each row got last and the block table of each row.

    Both have a row more than there are: the last one belongs to no request. All its blocks
    are the spare block of the cache.
    """

    def __init__(self, rows: base.Rows, device: torch.device, upload: Upload) -> None:
        """`rows`: what the host knows."""
        self.rows = rows
        capacity, width = rows.block_tables.shape
        self.last_tokens = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        self.tables = torch.zeros(capacity + 1, width, dtype=torch.int32, device=device)
        self.tables[capacity] = rows.num_cache_blocks
        self._upload = upload
        # Of each row, what of its table is on the device: the request's number and the blocks.
        self._takes: Ints = np.zeros(capacity, dtype=np.int64)
        self._counts: Ints = np.zeros(capacity, dtype=np.int64)

    def send(self, used: Ints) -> None:
        """Bring the tables of the rows that a pass uses up to date."""
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
        # Not before: there may have been no memory for it.
        self._takes[used], self._counts[used] = rows.num_takes[used], rows.num_blocks[used]

    def tables_of(self, rows: Ints, longest: int) -> Tensor:
        """Block tables of `rows`, as wide as a context of `longest` tokens needs: [R, width]."""
        (places,) = self._upload([rows])
        return self.narrow(longest).index_select(0, places)

    def narrow(self, longest: int) -> Tensor:
        """`tables` without what no context of `longest` tokens needs."""
        return self.tables[:, : -(-longest // self.rows.block_size)]
