"""The memory behind block numbers: keys and values of every token, in blocks."""

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.device.cpu.first_touch import Parts


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


def untouched(nbytes: int) -> Tensor:
    """So many bytes of zeros that take neither memory nor time until they are written."""
    # Not shared, as mmap's are otherwise: of those a page takes the system 1.2 us, and not 0.7.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def _zeros(nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """So many bytes of zeros; finite from the start, for the reason given in `store`."""
    if device.type != "cpu":
        return torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    # torch.zeros would write them all, a second for the embedded model's cache.
    return untouched(nbytes).view(dtype)


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
        count, address = 2 * shape.num_layers * shape.num_kv_heads, data.data_ptr()
        block_bytes, is_host = shape.block_bytes // count, device.type == "cpu"
        self.parts = Parts(address, count, num_blocks, block_bytes) if is_host else None
        # Keys and values are indexed alike, so that one operator stores or gathers both. Per layer
        # [2 * kv_heads * blocks * block_size, head_dim] …
        self._slots = [layer.view(-1, shape.head_dim) for layer in data]
        # … and the same memory as [2 * kv_heads * blocks, block_size * head_dim].
        self._blocks = [layer.view(-1, shape.block_size * shape.head_dim) for layer in data]
        self._heads = torch.arange(2 * shape.num_kv_heads, device=device)

    def slot_index(self, slots: Tensor) -> Tensor:
        """Where the tokens of `slots` [T] lie in every head: [T * 2 * kv_heads]."""
        return (slots[:, None] + self._heads * (self.num_blocks * self.shape.block_size)).flatten()

    def block_index(self, blocks: Tensor) -> Tensor:
        """Where the blocks of a flat table [N] lie in every head: [2 * kv_heads * N]."""
        return (self._heads[:, None] * self.num_blocks + blocks).flatten()

    def store(self, layer: int, slot_index: Tensor, key_value: Tensor) -> None:
        """Write key_value [T, 2 * kv_heads, head_dim], keys first, at `slot_index`.

        What is not finite is written as 0: masked slots are multiplied by 0, and 0 × NaN would
        carry one request's overflow into all that have its block in the padding of their tables.
        """
        finite = key_value.reshape(-1, self.shape.head_dim).nan_to_num(0.0, 0.0, 0.0)
        self._slots[layer].index_copy_(0, slot_index, finite)

    def gather(self, layer: int, block_index: Tensor, num_tables: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `num_tables` block tables of equal width.

        `block_index` comes from the flattened tables; the answers are
        [kv_heads * num_tables, width * block_size, head_dim].
        """
        gathered = self._blocks[layer].index_select(0, block_index)
        tables = self.shape.num_kv_heads * num_tables
        keys, values = gathered.view(2, tables, -1, self.shape.head_dim).unbind()
        return keys, values
