"""Paged attention compared to plain attention, for ragged rows and around block boundaries."""

import math

import torch
from text_generation_shard.device.base import Angles, CacheShape, ForwardBatch
from text_generation_shard.device.reference.attention import TorchAttention

BLOCK = 16
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
NO_ANGLES = Angles(torch.zeros(1, 2, 0), torch.zeros(0, dtype=torch.int64))


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Plain attention of the last len(query) tokens: [T, heads, head_dim], for each (token,
    head)."""
    out = torch.zeros_like(query)
    for token in range(len(query)):
        last = len(key) - len(query) + token
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = key[first : last + 1, shared] @ query[token, head]
            out[token, head] = scores.softmax(0) @ value[first : last + 1, shared]
    return out


def make_batch(contexts: list[int], lengths: list[int], is_decode: bool) -> ForwardBatch:
    """Rows with disjoint, shuffled blocks."""
    width = -(-max(contexts) // BLOCK)
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(len(contexts) * width, generator=generator).view(len(contexts), width)
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(contexts, lengths, strict=True)])
    offsets = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        rope_lens=None,
        slots=tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK,
        block_tables=tables,
        context_lens=torch.tensor(contexts),
        cu_seqlens_q=tuple(offsets),
        host_context_lens=tuple(contexts),
        logits_indices=torch.tensor([], dtype=torch.int64),
        is_decode=is_decode,
    )


def attention_on(device: str, scale: float = 1.0) -> TorchAttention:
    """The reference with an allocated cache."""
    return TorchAttention(
        scale, lambda *sizes: torch.zeros(math.prod(sizes), dtype=torch.uint8, device=device)
    )


def to_device(batch: ForwardBatch, device: str) -> ForwardBatch:
    values = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    return ForwardBatch(**moved)


def test_one_rows_overflow_does_not_reach_its_neighbours() -> None:
    backend = attention_on("cpu")
    shape = CacheShape(1, KV_HEADS, HEAD_DIM, BLOCK, torch.float32)
    backend.allocate(shape, 8)
    contexts = [3, 20]
    batch = make_batch(contexts, contexts, False)
    torch.manual_seed(0)
    key, value = torch.randn(23, KV_HEADS, HEAD_DIM), torch.randn(23, KV_HEADS, HEAD_DIM)
    key[:3], value[:3] = float("nan"), float("inf")
    heads = torch.cat([torch.zeros(23, HEADS, HEAD_DIM), key, value], dim=1)
    backend.forward(heads, 0, None, False, backend.plan(batch, NO_ANGLES))
    # Values that are not finite in one row's block must not reach the other row.
    step = make_batch([4, 21], [1, 1], True)
    ones = torch.ones(2, HEADS + 2 * KV_HEADS, HEAD_DIM)
    out = backend.forward(ones, 0, None, False, backend.plan(step, NO_ANGLES))
    assert bool(out.isfinite().all())
