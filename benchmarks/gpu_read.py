"""The benchmark's own kernel, which measures the read bandwidth."""

import triton
import triton.language as tl


@triton.jit
def sum_tiles(values_ptr, out_ptr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Program (part): out[part] = sum of TILES * TILE numbers of values, from part * TILES * TILE
    on. There is no mask: values has as many numbers as all programs read."""
    part = tl.program_id(0)
    at = part.to(tl.int64) * TILE * TILES + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for tile in range(TILES):
        total += tl.load(values_ptr + at + tile * TILE).to(tl.float32)
    tl.store(out_ptr + part, tl.sum(total, 0))
