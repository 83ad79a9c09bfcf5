"""The memory behind block numbers: keys and values of every token, in blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides the size of one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes over all layers, keys and values."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


class KVCache:
    """Owns one tensor [layers, 2, kv_heads, blocks, block_size, head_dim].

    Heads come before blocks, so that blocks gathered for one head lie as one contiguous
    [context, head_dim] matrix, ready for a batched matrix product without another copy.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        # Zeros, not empty: a masked position is multiplied by 0, and 0 × garbage can be NaN.
        data = torch.zeros(
            shape.num_layers,
            2,
            shape.num_kv_heads,
            num_blocks,
            shape.block_size,
            shape.head_dim,
            dtype=shape.dtype,
            device=device,
        )
        self.nbytes = data.nbytes
        rows = shape.num_kv_heads * num_blocks
        # Per layer and for keys and values: [kv_heads * blocks * block_size, head_dim] …
        self._slots = [layer.view(2, rows * shape.block_size, -1).unbind() for layer in data]
        # … and the same memory as [kv_heads * blocks, block_size * head_dim].
        self._blocks = [layer.view(2, rows, -1).unbind() for layer in data]

    def slot_index(self, slots: Tensor) -> Tensor:
        """Where the tokens of `slots` [T] lie in every head: [kv_heads * T]."""
        return self._per_head(slots, self.num_blocks * self.shape.block_size)

    def block_index(self, blocks: Tensor) -> Tensor:
        """Where the blocks of a flat table [N] lie in every head: [kv_heads * N]."""
        return self._per_head(blocks, self.num_blocks)

    def _per_head(self, index: Tensor, stride: int) -> Tensor:
        heads = torch.arange(self.shape.num_kv_heads, device=index.device) * stride
        return (heads[:, None] + index[None, :]).flatten()

    def store(self, layer: int, slot_index: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [T, kv_heads, head_dim] at `slot_index`."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slot_index, key.transpose(0, 1).reshape(-1, self.shape.head_dim))
        values.index_copy_(0, slot_index, value.transpose(0, 1).reshape(-1, self.shape.head_dim))

    def gather(self, layer: int, block_index: Tensor, num_tables: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `num_tables` block tables of equal width.

        `block_index` comes from the flattened tables; the answers are
        [kv_heads * num_tables, width * block_size, head_dim].
        """
        keys, values = self._blocks[layer]
        tables = self.shape.num_kv_heads * num_tables
        shape = (tables, -1, self.shape.head_dim)
        return (
            keys.index_select(0, block_index).view(shape),
            values.index_select(0, block_index).view(shape),
        )
