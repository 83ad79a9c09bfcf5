"""The memory behind block numbers: keys and values of every token, in blocks."""

import mmap
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


def _zeros(nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """So many bytes of zeros; finite from the start, for the reason given in `store`."""
    if device.type != "cpu":
        return torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    # Pages of an anonymous map are zero and cost nothing until they are written; torch.zeros would
    # write them all, a second for the embedded model's cache.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype)


class KVCache:
    """Owns one tensor [layers, 2, kv_heads, blocks, block_size, head_dim].

    Heads come before blocks, so that blocks gathered for one head lie as one contiguous
    [context, head_dim] matrix, ready for a batched matrix product without another copy.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.nbytes = shape.block_bytes * num_blocks
        data = _zeros(self.nbytes, shape.dtype, device).view(
            shape.num_layers,
            2,
            shape.num_kv_heads,
            num_blocks,
            shape.block_size,
            shape.head_dim,
        )
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
        """Write key and value [T, kv_heads, head_dim] at `slot_index`.

        What is not finite is written as 0: masked slots are multiplied by 0, and 0 × NaN would
        carry one request's overflow into all that have its block in the padding of their tables.
        """
        for slots, new in zip(self._slots[layer], (key, value), strict=True):
            finite = new.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
            slots.index_copy_(0, slot_index, finite.reshape(-1, self.shape.head_dim))

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
