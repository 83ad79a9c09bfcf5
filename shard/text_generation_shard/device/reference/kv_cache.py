"""The paged KV cache of the reference attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_shard.device.forward import CacheShape


class KVCache:
    """Owns one tensor [layers, 2, kv_heads, blocks, block_size, head_dim].

    Heads come before blocks, so that the gathered blocks of one head form a contiguous [context,
    head_dim] matrix, which a batched matrix product takes without another copy.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, make_zeros: Callable[[int, int, int], Tensor]
    ) -> None:
        """`make_zeros(parts, blocks per part, bytes per block)` returns zeros in uint8."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.nbytes = shape.block_bytes * num_blocks
        # Unwritten slots must be finite: see `store`.
        count = 2 * shape.num_layers * shape.num_kv_heads
        zeros = make_zeros(count, num_blocks, shape.block_bytes // count)
        data = zeros.view(shape.dtype).view(
            *(shape.num_layers, 2, shape.num_kv_heads),
            *(num_blocks, shape.block_size, shape.head_dim),
        )
        # Keys and values share indices, so that one operator stores or gathers both. Per layer [2 *
        # kv_heads * blocks * block_size, head_dim] …
        self._slots = [layer.view(-1, shape.head_dim) for layer in data]
        # … and the same memory as [2 * kv_heads * blocks, block_size * head_dim].
        self._blocks = [layer.view(-1, shape.block_size * shape.head_dim) for layer in data]
        self._heads = torch.arange(2 * shape.num_kv_heads, device=data.device)

    def slot_index(self, slots: Tensor) -> Tensor:
        """Indices of `slots` [T] in every head: [T * 2 * kv_heads]."""
        return (slots[:, None] + self._heads * (self.num_blocks * self.shape.block_size)).flatten()

    def block_index(self, blocks: Tensor) -> Tensor:
        """Indices of a flat block table [N] in every head: [2 * kv_heads * N]."""
        return (self._heads[:, None] * self.num_blocks + blocks).flatten()

    def store(self, layer: int, slot_index: Tensor, key_value: Tensor) -> None:
        """Write key_value [T, 2 * kv_heads, head_dim], keys first, at `slot_index`.

        Values that are not finite are written as 0: masked slots are multiplied by 0, and 0 × NaN
        would spread one request's overflow to every row whose padded block table contains the
        block.
        """
        finite = key_value.reshape(-1, self.shape.head_dim).nan_to_num(0.0, 0.0, 0.0)
        self._slots[layer].index_copy_(0, slot_index, finite)

    def gather(self, layer: int, block_index: Tensor, num_tables: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `num_tables` block tables of equal width.

        `block_index` is that of the flattened tables. Keys and values are [kv_heads * num_tables,
        width * block_size, head_dim] each.
        """
        gathered = self._blocks[layer].index_select(0, block_index)
        tables = self.shape.num_kv_heads * num_tables
        keys, values = gathered.view(2, tables, -1, self.shape.head_dim).unbind()
        return keys, values
