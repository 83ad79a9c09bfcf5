"""Prompt attention by torch's FlashAttention-2 (`varlen_attn`). It does not read block tables, so
keys and values are gathered first."""

import inspect
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from text_generation_shard.device.cuda.kernels import launch, pointwise
from text_generation_shard.device.cuda.rows import HeadShape, Prompts

MOST_TOKENS = 1 << 16
"""Most tokens whose keys and values are gathered in a pass; bounds the memory."""

# Least compute capability.
_CAPABILITY = 80
# Tile of one program of `gather`: tokens (one block) and features.
_TILE, _PART = 16, 1024
# torch 2.11 has grouped KV heads without this argument.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def suits(shape: HeadShape, dtype: torch.dtype, capability: int) -> bool:
    """Whether it supports heads of this shape."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and capability >= _CAPABILITY
        and shape.head_dim <= 256
        and shape.head_dim % 8 == 0
    )


def attend(
    shape: HeadShape,
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
    rows: Prompts,
) -> Tensor:
    """See `prefill.attend_prompts`, which has the same arguments. Returns [T, num_heads *
    head_dim]."""
    gathered = heads.new_empty(2, rows.num_keys, shape.num_kv_heads, shape.head_dim)
    width = shape.num_kv_heads * shape.head_dim
    part = min(_PART, triton.next_power_of_2(width))
    launch(
        pointwise.gather,
        (len(rows.lens), -(-rows.longest_context // _TILE), -(-width // part)),
        *(keys, values, rows.tables, rows.lens, rows.key_starts, *gathered, rows.tables.shape[1]),
        WIDTH=width,
        PART=part,
        TILE=_TILE,
    )
    found = varlen_attn(
        heads[:, : shape.num_heads],
        gathered[0],
        gathered[1],
        rows.starts,
        rows.key_starts,
        rows.longest,
        rows.longest_context,
        scale=shape.scale,
        # Visible tokens before the token itself; -1: all.
        window_size=(window - 1, 0),
        **_GROUPED,
    )
    assert isinstance(found, Tensor)
    return found.flatten(1)
