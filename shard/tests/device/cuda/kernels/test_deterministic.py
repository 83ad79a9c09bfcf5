"""With `is_deterministic`, a token gets the same bits in any pass of the CUDA device's
attention."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from text_generation_shard.device.base import CacheShape
from text_generation_shard.device.cuda import attention as own_attention
from text_generation_shard.device.cuda.attention import HeadShape, TritonAttention
from torch import Tensor

from shard.tests import interpreted
from shard.tests.device.cuda.kernels.test_attention import check, on_place, put
from shard.tests.device.test_attention import NO_ANGLES
from shard.tests.interpreted import CAPABILITY, FLOAT8, PLACE

pytestmark = [*interpreted.MARKS, pytest.mark.slow]
SHAPE = HeadShape(3, 1, 64, 0.125)
# Tokens of two rows, one longer than a split of the interpreter, and tokens computed before.
CONTEXTS, BEFORE = (67, 4), (62, 0)
# How the remaining tokens are split into passes.
WHOLE = [(5, 4)]
PARTS = [(2, 0), (1, 3), (2, 1)]
DECODED = [(1, 1), (1, 1), (1, 1), (1, 1), (1, 0)]


def attended(
    attention: TritonAttention,
    rows: Sequence[Tensor],
    passes: Sequence[tuple[int, int]],
    window: int | None,
) -> list[Tensor]:
    """Results of the tokens of each row of heads: [tokens, num_heads * head_dim] each."""
    found: list[list[Tensor]] = [[] for _ in rows]
    whole, ends = on_place(list(CONTEXTS), list(CONTEXTS)), list(BEFORE)
    slots = whole.slots.split(CONTEXTS)
    for counts in passes:
        taken = [(row, ends[row], count) for row, count in enumerate(counts) if count]
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        batch = replace(
            on_place([ends[row] for row, _, _ in taken], [count for _, _, count in taken]),
            block_tables=whole.block_tables[[row for row, _, _ in taken]],
            slots=torch.cat([slots[row][start : start + count] for row, start, count in taken]),
        )
        heads = torch.cat([rows[row][start : start + count] for row, start, count in taken])
        answer = attention.forward(heads, 0, window, False, attention.plan(batch, NO_ANGLES))
        parts = answer.split([count for _, _, count in taken])
        for (row, _, _), part in zip(taken, parts, strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(("window", "kept"), [(None, torch.bfloat16), (20, FLOAT8[-1])])
def test_bit_for_bit(window: int | None, kept: torch.dtype) -> None:
    """In one pass, in parts together with another row, and token by token."""
    torch.manual_seed(0)
    rows = [torch.randn(count, 5, 64).to(PLACE, torch.bfloat16) for count in CONTEXTS]
    answers = []
    for passes in (WHOLE, PARTS, DECODED):
        attention = TritonAttention(SHAPE, PLACE, CAPABILITY, is_deterministic=True)
        attention.allocate(CacheShape(1, SHAPE.num_kv_heads, SHAPE.head_dim, 16, kept), 16)
        put(attention, on_place(list(CONTEXTS), list(CONTEXTS)), torch.cat(rows)[:, 3:])
        answers.append(torch.cat(attended(attention, rows, passes, window)).view(torch.int16))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


def test_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many launches as the memory bound requires; torch's attention is not called."""
    monkeypatch.setattr(own_attention, "_MOST_SPLITS", 16)
    options = {"takes_flash": True, "is_deterministic": True}
    check(SHAPE, torch.bfloat16, [1, 1, 9, 1, 6], 40, **options)
