"""The CUDA device's attention against attention written down plainly, under the interpreter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from text_generation_shard.device.base import Angles, CacheShape
from text_generation_shard.device.cuda import attention as own_attention
from text_generation_shard.device.cuda.attention import HeadShape, TritonAttention
from torch import Tensor

from shard.tests import interpreted
from shard.tests.driver import Driver, load_engine, reference_device
from shard.tests.test_attention import NO_ANGLES, attention_on, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Around the ends of blocks, tiles and splits.
CONTEXTS = [1, 16, 64, 65, 129]


def definition(
    heads: Tensor,
    count: int,
    shape: HeadShape,
    window: int | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """The last `count` tokens of a row attend: [count, num_heads * head_dim], in float64."""
    kinds = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    query, key, value = heads.double().split(kinds, dim=1)
    group = shape.num_heads // shape.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query[-count:], key) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    position = torch.arange(len(heads) - count, len(heads))[:, None]
    distance = torch.arange(len(heads))[None] - position
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(window or 2**30))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        beside = sinks.double()[:, None, None].expand(-1, count, 1)
        scores = torch.cat((scores, beside), dim=2)
    weights = scores.softmax(2)[:, :, : len(heads)]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def check(
    shape: HeadShape,
    dtype: torch.dtype,
    lengths: list[int],
    window: int | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Rows of CONTEXTS tokens, the last `lengths` of which attend in one pass behind the others."""
    torch.manual_seed(0)
    attention = TritonAttention(shape, torch.device("cpu"), 0, slopes, sinks)
    attention.allocate(CacheShape(1, shape.num_kv_heads, shape.head_dim, 16, dtype), 128)
    width = shape.num_heads + 2 * shape.num_kv_heads
    rows = [torch.randn(length, width, shape.head_dim).to(dtype) for length in CONTEXTS]
    counts = [min(length, len(row)) for length, row in zip(lengths, rows, strict=True)]
    # What came before is stored, and not asked for.
    before = attention.plan(make_batch(CONTEXTS, CONTEXTS, False), NO_ANGLES)
    assert attention.cache is not None
    attention.store(torch.cat(rows), *attention.cache[0], False, before)
    plan = attention.plan(make_batch(CONTEXTS, counts, set(counts) == {1}), NO_ANGLES)
    heads = torch.cat([row[-count:] for row, count in zip(rows, counts, strict=True)])
    found = attention.forward(heads, 0, window, False, plan)
    wanted = torch.cat(
        [
            definition(row, count, shape, window, slopes, sinks)
            for row, count in zip(rows, counts, strict=True)
        ]
    )
    assert (
        found.isfinite().all()
        and (found.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    )


ONE = [1] * len(CONTEXTS)
MIXED = [1, 15, 1, 33, 20]
TAILS = pytest.mark.parametrize("lengths", [ONE, MIXED], ids=["decode", "mixed"])


@TAILS
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_types(lengths: list[int], dtype: torch.dtype) -> None:
    check(HeadShape(4, 2, 64, 0.125), dtype, lengths)


@TAILS
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_heads_share_keys(lengths: list[int], group: int) -> None:
    check(HeadShape(2 * group, 2, 64, 0.125), torch.bfloat16, lengths)


@TAILS
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_heads_have_any_size(lengths: list[int], head_dim: int) -> None:
    check(HeadShape(4, 2, head_dim, head_dim**-0.5), torch.float16, lengths)


@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("count", [1, 20])
def test_queries_and_keys_are_rotated(rotary_dim: int, count: int) -> None:
    """Against the reference device, which others are tested against, too."""
    torch.manual_seed(0)
    length, shape = 33, CacheShape(1, 2, 64, 16, torch.float32)
    turn = torch.rand(64, rotary_dim // 2) * 6
    table = torch.stack((turn.cos(), turn.sin()), dim=1)
    row, answers = torch.randn(length, 8, 64), []
    own = HeadShape(4, 2, 64, 0.125)
    reference = attention_on("cpu", 0.125)
    for attention in (reference, TritonAttention(own, torch.device("cpu"), 0)):
        attention.allocate(shape, 16)
        for part in (length, count):
            batch = make_batch([length], [part], part == 1)
            plan = attention.plan(batch, Angles(table, batch.positions))
            found = attention.forward(row[-part:].clone(), 0, None, True, plan)
        answers.append(found)
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


def test_a_model_says_what_it_says_by_the_reference(
    checkpoint: Callable[[str], Path],
) -> None:
    """A prompt in parts, beside a row that decodes."""
    found = []
    for device in (reference_device(), interpreted.device(torch.float32)):
        limits = {"max_prefill_tokens": 8, "max_batch_size": 2, "max_total_tokens": 20}
        driver = Driver(load_engine(checkpoint("qwen3"), device=device, **limits))
        driver.add([driver.request(0, range(5, 9), max_new_tokens=3, ignore_eos_token=True)])
        request = driver.request(1, range(40, 51), max_new_tokens=2, ignore_eos_token=True)
        driver.add([request], driver.advance({}))
        driver.run()
        found.append(driver.tokens)
    assert found[0] == found[1]


@TAILS
@pytest.mark.parametrize("window", [1, 40, 1000])
def test_windows(lengths: list[int], window: int) -> None:
    check(HeadShape(4, 2, 64, 0.125), torch.float32, lengths, window)


@TAILS
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("which", ["soft cap", "slopes", "sinks", "all"])
def test_scores_are_changed(lengths: list[int], window: int | None, which: str) -> None:
    cap = 5.0 if which in ("soft cap", "all") else 0.0
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01]) if which in ("slopes", "all") else None
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0]) if which in ("sinks", "all") else None
    shape = HeadShape(4, 2, 64, 0.5, cap)
    check(shape, torch.float32, lengths, window, slopes, sinks)


def test_rows_are_decoded_in_groups_that_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_attention, "_MOST_SPLITS", 4)
    check(HeadShape(4, 2, 64, 0.125), torch.float32, ONE)
