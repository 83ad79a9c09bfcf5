"""The kernels compared to torch, and their guarantee: a result depends only on its own row."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit, types
from numba.core.errors import TypingError
from text_generation_shard.arrays import Ints
from text_generation_shard.checkpoint.rope import RopeConfig, RotaryEmbedding
from text_generation_shard.device.base import Angles, CacheShape, ForwardBatch
from text_generation_shard.device.cpu import attention as packed
from text_generation_shard.device.cpu.attention import PackedAttention
from text_generation_shard.device.cpu.kernels import are_vectors_wide, pointwise, tile
from text_generation_shard.device.cpu.kernels.layers import plan_rows
from text_generation_shard.device.cpu.kernels.llvm import BYTES, call, load, store
from text_generation_shard.device.cpu.matrices import (
    Int4Matrix,
    Int8Matrix,
    PackedInt4Matrix,
    PackedInt8Matrix,
    PackedWeight,
)
from text_generation_shard.device.reference.attention import TorchRotation
from torch import Tensor

from shard.tests.device.test_attention import NO_ANGLES

DTYPES = [torch.float32, torch.bfloat16]
# Tolerance of one rounding of a result near 1, and of sums of some hundred products.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(960, 576), (48, 64), (50, 33), (7, 16), (300, 64), (1, 1)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 40, 300])
def test_linear(dtype: torch.dtype, size: tuple[int, int], rows: int) -> None:
    weight = torch.randn(size).to(dtype)
    hidden = torch.randn(rows, size[1]).to(dtype)
    out = PackedWeight(weight)(hidden)
    expected = hidden.double() @ weight.double().T
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    weight = torch.randn(100, 70).to(dtype)
    packed = PackedWeight(weight)
    hidden = torch.randn(270, 70).to(dtype)
    together = packed(hidden)
    for first, last in [(0, 1), (3, 5), (7, 10), (100, 104), (200, 209), (255, 270)]:
        alone = packed(hidden[first:last])
        assert torch.equal(alone, together[first:last])


@pytest.mark.skipif(not are_vectors_wide(), reason="8 and 4 bits need AVX-512")
@pytest.mark.parametrize("forms", [(PackedInt8Matrix, Int8Matrix), (PackedInt4Matrix, Int4Matrix)])
@pytest.mark.parametrize("size", [(960, 576), (48, 64), (16, 32), (64, 96), (80, 128), (64, 3200)])
def test_weights_of_8_and_4_bits(forms: tuple[type, type], size: tuple[int, int]) -> None:
    tiled, reference = forms
    weight = torch.randn(size)
    product = tiled(weight, torch.bfloat16)
    # The same numbers in plain form.
    exact = reference(weight, torch.bfloat16)(torch.eye(size[1], dtype=torch.bfloat16)).double()
    hidden = torch.randn(300, size[1], dtype=torch.bfloat16)
    together = product(hidden)
    scale = (hidden.double().abs() @ exact.abs()).clamp_min(1)
    assert ((together.double() - hidden.double() @ exact).abs() / scale).max() < 0.01
    for first, last in [(0, 1), (3, 5), (7, 10), (100, 104), (200, 211), (30, 54), (250, 300)]:
        assert torch.equal(product(hidden[first:last]), together[first:last])


@pytest.mark.skipif(not are_vectors_wide(), reason="8 and 4 bits need AVX-512")
@pytest.mark.slow
def test_every_number_of_a_byte_is_multiplied_exactly() -> None:
    """255 one-hot inputs, one for each number; 17 outputs, which do not fill the panels."""
    numbers = torch.arange(-127, 128, dtype=torch.int8).expand(17, 255)
    weight = PackedWeight(numbers, torch.full((17,), 0.5))
    out = weight(torch.eye(255, dtype=torch.bfloat16))
    assert torch.equal(out.T.float(), numbers.bfloat16().float() / 2)
    assert torch.equal(weight.rows(torch.tensor([0, 16])), numbers[:2])


@pytest.mark.skipif(not are_vectors_wide(), reason="8 and 4 bits need AVX-512")
def test_bytes_on_a_processor_without_tables_of_them() -> None:
    """Without AVX512_VBMI: the same bits for every magnitude and both signs."""

    @njit
    def convert(numbers, lower, upper):  # type: ignore[no-untyped-def]
        parts = tile.convert_magnitudes(load(BYTES, numbers))
        store(parts[0], lower)
        store(parts[1], upper)

    for first in range(-128, 128, 64):
        numbers = torch.arange(first, first + 64, dtype=torch.int8)
        halves = torch.zeros(2, 64, dtype=torch.int8)
        convert(numbers.data_ptr(), halves[0].data_ptr(), halves[1].data_ptr())
        expected = (numbers & 127).bfloat16().view(torch.int8).view(64, 2)
        assert torch.equal(halves.T, expected)


def test_tiles_of_two_sizes_have_no_common_name() -> None:
    """See `tile.sized`."""
    for make in (tile.tile, tile.paged_tile):
        names = {make(rows, columns).__qualname__ for rows in (1, 8) for columns in (1, 3)}
        assert len(names) == 4


def test_rows_of_an_int8_weight() -> None:
    weight = torch.randn(50, 64)
    ids = torch.tensor([0, 17, 49, 17])
    tiled, reference = (form(weight, torch.bfloat16) for form in (PackedInt8Matrix, Int8Matrix))
    assert torch.equal(tiled.lookup(ids), reference.lookup(ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("size", [576, 50, 7])
def test_norm_takes_in_and_normalises(dtype: torch.dtype, size: int, rows: int) -> None:
    hidden, delta = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)
    weight = torch.rand(size)
    total = (hidden.float() + 0.5 * delta.float()).to(dtype)
    out = pointwise.add_norm(hidden, delta, 0.5, weight, 1e-5)
    expected = F.rms_norm(total.float(), (size,), weight, 1e-5)
    assert torch.equal(hidden, total)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
    again = pointwise.add_norm(hidden, None, 1.0, weight, 1e-5)
    assert torch.equal(again, out) and torch.equal(hidden, total)


def test_tensors_that_would_be_misread_are_refused() -> None:
    rows, weight = torch.randn(5, 3, 16), torch.ones(16)
    # A view of one head: its rows have gaps between them.
    one = rows[:, 1]
    with pytest.raises(AssertionError, match="strides"):
        pointwise.add_norm(one, None, 1.0, weight, 1e-5)
    with pytest.raises(AssertionError, match="bfloat16"):
        pointwise.add_norm(one.contiguous(), one.bfloat16(), 1.0, weight, 1e-5)
    product = PackedWeight(torch.randn(16, 16))
    with pytest.raises(AssertionError, match="bfloat16"):
        product(one.bfloat16().contiguous())
    with pytest.raises(AssertionError, match="strides"):
        pointwise.rotate_(rows[:, :2], 1, 1, 1.0, torch.ones(9, 2, 8), torch.arange(5))


def test_compiled_code_is_given_no_array_with_gaps() -> None:
    """Refused when the caller is compiled, so it costs nothing later."""

    @njit
    def pass_on(given: tuple[Ints, int]) -> None:
        call(np.int64(0), (given,))

    pass_on.compile((types.Tuple((types.int64[:, ::1], types.int64)),))
    with pytest.raises(TypingError, match="not contiguous"):
        pass_on.compile((types.Tuple((types.int64[:, :], types.int64)),))


@pytest.mark.parametrize("quantize", ["float32", "bfloat16", "int8", "int4"])
def test_gated(quantize: str) -> None:
    weight, is_float32 = torch.randn(160, 96), quantize == "float32"
    if quantize in ("int8", "int4"):
        if not are_vectors_wide():
            pytest.skip("8 and 4 bits need AVX-512")
        form = {"int8": PackedInt8Matrix, "int4": PackedInt4Matrix}[quantize]
        product, gated = (form(weight, torch.bfloat16, is_gated=gate) for gate in (False, True))
    else:
        kept = weight.to(getattr(torch, quantize))
        product, gated = (PackedWeight(kept, is_gated=gate) for gate in (False, True))
    for rows in (1, 2, 3, 5, 7, 40, 300):
        hidden = torch.randn(rows, 96).to(torch.float32 if is_float32 else torch.bfloat16)
        gate, up = product(hidden).float().chunk(2, dim=-1)
        out = gated(hidden)
        bound = {"rtol": 1e-5, "atol": 1e-3} if is_float32 else {"rtol": 0.03, "atol": 0.1}
        torch.testing.assert_close(out.float(), F.silu(gate) * up, **bound)
        assert torch.equal(gated(hidden[-1:]), out[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize("rotary_dim", [32, 8])
def test_rotation(dtype: torch.dtype, rows: int, rotary_dim: int) -> None:
    heads = torch.randn(rows, 7, 32).to(dtype)
    angles = torch.rand(rows, rotary_dim // 2) * 6
    table = Angles(torch.stack((angles.cos(), angles.sin()), dim=1), torch.arange(len(heads)))
    expected = heads.float()
    TorchRotation(table, torch.float32).rotate_(expected, 5, 3, 0.25)
    pointwise.rotate_(heads, 5, 3, 0.25, *table)
    torch.testing.assert_close(heads.float(), expected, rtol=TOLERANCE[dtype], atol=1e-5)


class Sequences:
    """Sequences of heads in shuffled blocks, which a pass may continue anywhere."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int, int], lengths: list[int]) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = shape
        count = sum(-(-length // 16) for length in lengths)
        blocks = torch.randperm(count + 2).tolist()
        self.tables = [[blocks.pop() for _ in range(-(-length // 16))] for length in lengths]
        width = self.num_heads + 2 * self.num_kv_heads
        self.heads = [torch.randn(length, width, self.head_dim).to(dtype) for length in lengths]
        self.attention = PackedAttention(self.num_heads, self.num_kv_heads, 1.0)
        cache = CacheShape(2, self.num_kv_heads, self.head_dim, 16, dtype)
        self.attention.allocate(cache, count + 2)

    def run(self, spans: list[tuple[int, int, int]], window: int | None = None) -> list[Tensor]:
        """One pass over (sequence, start, end); returns the attention of each."""
        parts = [self.heads[item][start:end] for item, start, end in spans]
        passed = torch.cat(parts)
        offsets = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        width = max(len(table) for table in self.tables)
        tables = torch.tensor(
            [self.tables[item] + [0] * (width - len(self.tables[item])) for item, _, _ in spans]
        )
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        rows = torch.arange(len(spans)).repeat_interleave(torch.tensor(offsets).diff())
        contexts = [end for _, _, end in spans]
        batch = ForwardBatch(
            input_ids=positions,
            positions=positions,
            rope_lens=None,
            slots=tables[rows, positions // 16] * 16 + positions % 16,
            block_tables=tables,
            context_lens=torch.tensor(contexts),
            cu_seqlens_q=tuple(offsets),
            host_context_lens=tuple(contexts),
            logits_indices=None,
            is_decode=False,
        )
        plan = self.attention.plan(batch, NO_ANGLES)
        out = self.attention.forward(passed, 1, window, False, plan)
        return list(out.split([len(part) for part in parts]))

    def expected(self, item: int, start: int, end: int, window: int | None) -> Tensor:
        """The same by torch, in float32."""
        heads = self.heads[item][:end].float().transpose(0, 1)
        heads = torch.where(heads.isfinite(), heads, 0.0)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads])
        query_places, places = torch.arange(start, end)[:, None], torch.arange(end)[None]
        mask = places <= query_places
        if window is not None:
            mask &= places > query_places - window
        out = F.scaled_dot_product_attention(
            query[None, :, start:], key[None], value[None], mask, scale=1.0, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 16), (8, 1, 48), (4, 2, 80), (14, 2, 128)])
@pytest.mark.parametrize("window", [None, 7, 70])
def test_attention(dtype: torch.dtype, shape: tuple[int, int, int], window: int | None) -> None:
    sequences = Sequences(dtype, shape, [1, 100, 17, 170])
    # First the preceding tokens, then all at once: one token, a few, a long part, a beginning.
    sequences.run([(1, 0, 97), (3, 0, 130)], window)
    spans = [(0, 0, 1), (1, 97, 100), (2, 0, 17), (3, 130, 170)]
    for out, span in zip(sequences.run(spans, window), spans, strict=True):
        expected = sequences.expected(*span, window)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=5 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_attention_is_the_same_however_a_sequence_is_cut(
    dtype: torch.dtype, window: int | None
) -> None:
    sequences = Sequences(dtype, (6, 2, 32), [150, 90, 33])
    [whole] = sequences.run([(0, 0, 150)], window)
    for cuts in ([0, 64, 128, 150], [0, 1, 2, 63, 65, 149, 150], [0, 16, 150]):
        parts = [
            sequences.run([(2, 0, 33), (0, start, end), (1, 0, 90)], window)[1]
            for start, end in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_numbers_that_are_not_finite_harm_their_own_sequence_alone() -> None:
    sequences = Sequences(torch.bfloat16, (4, 2, 32), [40, 40])
    sequences.heads[0][:, 2:] = float("nan")
    sequences.heads[0][5, 4] = float("inf")
    spans = [(0, 0, 40), (1, 0, 40)]
    _, out = sequences.run(spans)
    expected = sequences.expected(1, 0, 40, None)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.05)
    # Their block is reused by the other sequence, which fills a part of it.
    sequences.tables[1][2:] = sequences.tables[0][2:]
    _, out = sequences.run([(0, 0, 40), (1, 0, 33)])
    assert out.isfinite().all()


def test_angles_are_looked_up_however_far_a_position_is() -> None:
    """The table grows; earlier results do not change."""
    rotary = RotaryEmbedding(RopeConfig("default", 1e4, 16, 2048, 2048, {}), torch.device("cpu"))
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 16, 2).float() / 16)
    for places in ([0, 5], [1023, 1024], [0, 4095, 4096], [3, 1]):
        positions = torch.tensor(places)
        found = rotary.table(max(places) + 1)[positions]
        angles = positions.float()[:, None] * frequencies
        expected = torch.stack((angles.cos(), angles.sin()), dim=1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("contexts", [[7], [3, 900, 17, 17, 1], list(range(1, 40))])
def test_tasks_of_a_decode_are_those_of_any_pass(contexts: list[int], num_threads: int) -> None:
    count, ends = len(contexts), np.array(contexts)
    rows = np.random.default_rng(0).permutation(count + 3)[:count]
    token_ids = np.arange((count + 3) * 1000, dtype=np.int32).reshape(-1, 1000)
    tables = np.arange((count + 3) * 63).reshape(-1, 63)
    for group in (3, 19):
        expected = packed._tasks(np.arange(count + 1), ends, group, num_threads)
        given = rows, ends - 1, token_ids, tables, group, num_threads
        input_ids, slots, tasks = plan_rows(*given)
        assert np.array_equal(input_ids, token_ids[rows, ends - 1])
        assert np.array_equal(slots, tables[rows, (ends - 1) // 16] * 16 + (ends - 1) % 16)
        expected[:, 0] = rows[expected[:, 0]]
        assert np.array_equal(tasks, expected)
