"""The CUDA device's attention compared to plain attention."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from text_generation_shard.device.base import Angles, CacheShape, ForwardBatch
from text_generation_shard.device.cuda import attention
from text_generation_shard.device.cuda import attention as own_attention
from text_generation_shard.device.cuda.attention import HeadShape, TritonAttention
from torch import Tensor

from integration_tests.marks import at_night
from shard.tests import interpreted
from shard.tests.device.test_attention import NO_ANGLES, attention_on, make_batch, to_device
from shard.tests.driver import Driver, load_engine, reference_device
from shard.tests.interpreted import CAPABILITY, FLOAT8, HAS_GPU, PLACE

pytestmark = [*interpreted.MARKS, pytest.mark.slow]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Around the ends of blocks, tiles and splits; the interpreter's are smaller.
CONTEXTS = [1, 16, 64, 65, 129, *([511, 512, 513, 1500] if HAS_GPU else [])]


def definition(heads: Tensor, count: int, shape: HeadShape, window: int | None) -> Tensor:
    """Plain attention of the last `count` tokens of a row: [count, num_heads * head_dim], in
    float64."""
    kinds = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    query, key, value = heads.double().split(kinds, dim=1)
    group = shape.num_heads // shape.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query[-count:], key) * shape.scale
    token = torch.arange(len(heads), device=heads.device)
    distance = token[None] - token[-count:, None]
    hidden = (distance > 0) | (distance <= -(window or 2**30))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def rounded(values: Tensor, kept: torch.dtype) -> Tensor:
    """Round to float8, with saturation."""
    largest = torch.finfo(kept).max
    return values.float().clamp(-largest, largest).to(kept)


def check(
    shape: HeadShape,
    dtype: torch.dtype,
    lengths: list[int],
    window: int | None = None,
    takes_flash: bool = False,
    kept: torch.dtype | None = None,
    is_deterministic: bool = False,
) -> None:
    """Rows of CONTEXTS tokens; one pass computes the last `lengths` of each. kept: the dtype of the
    cache."""
    torch.manual_seed(0)
    attention = TritonAttention(
        shape, PLACE, CAPABILITY, takes_flash=takes_flash, is_deterministic=is_deterministic
    )
    attention.allocate(CacheShape(1, shape.num_kv_heads, shape.head_dim, 16, kept or dtype), 1024)
    width = shape.num_heads + 2 * shape.num_kv_heads
    rows = [torch.randn(length, width, shape.head_dim).to(PLACE, dtype) for length in CONTEXTS]
    lengths = [*lengths, *lengths][: len(rows)]
    counts = [min(length, len(row)) for length, row in zip(lengths, rows, strict=True)]
    heads = torch.cat([row[-count:] for row, count in zip(rows, counts, strict=True)])
    if kept is not None:
        for row in rows:
            row[:, shape.num_heads :] = rounded(row[:, shape.num_heads :], kept).to(dtype)
    # The preceding tokens are only stored in the cache.
    batch = on_place(CONTEXTS, counts)
    put(attention, on_place(CONTEXTS, CONTEXTS), torch.cat(rows)[:, shape.num_heads :])
    put(attention, batch, torch.zeros_like(heads[:, shape.num_heads :]))
    found = attention.forward(heads, 0, window, False, attention.plan(batch, NO_ANGLES))
    wanted = torch.cat(
        [definition(row, count, shape, window) for row, count in zip(rows, counts, strict=True)]
    )
    assert (
        found.isfinite().all()
        and (found.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    )


def put(attention: TritonAttention, batch: ForwardBatch, key_value: Tensor) -> None:
    """Store keys and values [T, 2 * num_kv_heads, head_dim] in the cache."""
    assert attention.cache is not None
    keys, values = key_value.to(attention.cache.dtype).chunk(2, dim=1)
    for part, own in zip(attention.cache[0], (keys, values), strict=True):
        # As bytes: not every version of torch can index float8 on a GPU.
        part.view(torch.uint8)[batch.slots] = own.contiguous().view(torch.uint8)


def on_place(contexts: list[int], lengths: list[int]) -> ForwardBatch:
    """Rows of a pass."""
    return to_device(make_batch(contexts, lengths, set(lengths) == {1}), str(PLACE))


ONE = [1] * 5
# Two decoding rows, followed by prompts, one of which has one token left.
MIXED = [1, 1, 33, 1, 20]
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
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_heads_have_any_size(lengths: list[int], head_dim: int) -> None:
    check(HeadShape(4, 2, head_dim, head_dim**-0.5), torch.float16, lengths)


@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("count", [1, 20])
def test_queries_and_keys_are_rotated(rotary_dim: int, count: int) -> None:
    """Compared to the reference device."""
    torch.manual_seed(0)
    length, shape = 33, CacheShape(1, 2, 64, 16, torch.float32)
    turn = torch.rand(64, rotary_dim // 2) * 6
    table = torch.stack((turn.cos(), turn.sin()), dim=1).to(PLACE)
    row, answers = torch.randn(length, 8, 64).to(PLACE), []
    own = HeadShape(4, 2, 64, 0.125)
    reference = attention_on(str(PLACE), 0.125)
    for each in (reference, TritonAttention(own, PLACE, CAPABILITY)):
        each.allocate(shape, 16)
        for part in (length, count):
            batch = on_place([length], [part])
            plan = each.plan(batch, Angles(table, batch.positions))
            found = each.forward(row[-part:].clone(), 0, None, True, plan)
        answers.append(found)
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["granite", *at_night("qwen3-one-kv-head", "smollm3-sliding")])
def test_a_model_says_what_it_says_by_the_reference(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """A prompt in parts, together with a decoding row."""
    found = []
    for device in (reference_device(), interpreted.device(torch.float32)):
        limits = {"max_prefill_tokens": 8, "max_batch_size": 2, "max_total_tokens": 20}
        driver = Driver(load_engine(checkpoint(family), device=device, **limits))
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


def test_rows_are_decoded_in_groups_that_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_attention, "_MOST_SPLITS", 4)
    check(HeadShape(4, 2, 64, 0.125), torch.float32, ONE)


@pytest.mark.filterwarnings("ignore:invalid value")
@TAILS
@pytest.mark.parametrize("kept", [torch.bfloat16, *FLOAT8])
def test_nan_is_not_lost(lengths: list[int], kept: torch.dtype) -> None:
    """NaN in one split of several makes only its own row NaN."""
    shape = HeadShape(2, 1, 64, 0.125)
    attention = TritonAttention(shape, PLACE, CAPABILITY)
    attention.allocate(CacheShape(1, 1, 64, 16, kept), 1024)
    contexts, counts = CONTEXTS[:5], [min(pair) for pair in zip(CONTEXTS, lengths, strict=False)]
    plan = attention.plan(on_place(contexts, contexts), NO_ANGLES)
    assert attention.cache is not None
    heads = torch.randn(sum(contexts), 4, 64).to(PLACE, torch.bfloat16)
    heads[-60, 2] = float("nan")  # a key of the last row
    attention.store(heads, *attention.cache[0], False, plan)
    asked = torch.randn(sum(counts), 4, 64).to(PLACE, torch.bfloat16)
    found = attention.forward(
        asked, 0, None, False, attention.plan(on_place(contexts, counts), NO_ANGLES)
    )
    is_number = found.isfinite().all(dim=1)
    assert not is_number[-counts[4] :].any() and is_number[: -counts[4]].all()


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    most: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """`varlen_attn` as torch documents it, in plain torch: it runs on GPUs only."""
    assert key.dtype == value.dtype == query.dtype
    assert window_size[1] == 0 and most >= 1 and most_keys >= 1 and enable_gqa
    found = []
    shape = HeadShape(query.shape[1], key.shape[1], query.shape[2], scale)
    for row in range(len(starts) - 1):
        own = slice(int(starts[row]), int(starts[row + 1]))
        keys = slice(int(key_starts[row]), int(key_starts[row + 1]))
        count, context = own.stop - own.start, keys.stop - keys.start
        assert count <= most and context <= most_keys
        heads = query.new_zeros(context, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        heads[-count:, : shape.num_heads] = query[own]
        heads[:, shape.num_heads :] = torch.cat((key[keys], value[keys]), dim=1)
        window = None if window_size[0] < 0 else window_size[0] + 1
        found.append(definition(heads, count, shape, window).to(query.dtype))
    return torch.cat(found).view(query.shape)


@TAILS
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_prompts_by_the_attention_of_torch(
    lengths: list[int], window: int | None, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    assert attention.suits_flash(HeadShape(4, 2, head_dim, 0.125), torch.bfloat16, 80)
    check(HeadShape(4, 2, head_dim, 0.125), torch.bfloat16, lengths, window, takes_flash=True)


def test_attention_that_torch_does_not_have_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what would take too much memory."""
    plain = HeadShape(4, 2, 64, 0.125)
    assert not attention.suits_flash(plain, torch.float32, 90)
    assert not attention.suits_flash(plain, torch.float16, 75)
    assert not attention.suits_flash(plain._replace(head_dim=320), torch.float16, 90)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("too much is gathered")

    monkeypatch.setattr(attention, "MOST_TOKENS", 100)
    monkeypatch.setattr(TritonAttention, "_attend_gathered", refuse)
    check(plain, torch.bfloat16, MIXED, takes_flash=True)
