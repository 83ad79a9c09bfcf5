"""The CUDA device's float8 cache, compared to torch's rounding."""

import pytest
import torch
from text_generation_shard.device import open_device
from text_generation_shard.device.base import Angles, CacheShape, DeviceOptions
from text_generation_shard.device.cuda.attention import HeadShape, TritonAttention
from text_generation_shard.device.cuda.device import check_cache_dtype
from text_generation_shard.device.cuda.kernels import attention as kernels
from text_generation_shard.device.cuda.kernels import launch
from text_generation_shard.errors import ModelError
from torch import Tensor

from shard.tests import interpreted
from shard.tests.device.cuda.kernels.test_attention import (
    MIXED,
    TAILS,
    TOLERANCE,
    check,
    on_place,
    rounded,
)
from shard.tests.device.test_attention import NO_ANGLES
from shard.tests.interpreted import CAPABILITY, FLOAT8, PLACE

pytestmark = [*interpreted.MARKS, pytest.mark.slow]
KINDS = pytest.mark.parametrize("kept", FLOAT8)
# The dtype that the bits are stored as.
WIDTH = 4096


def stored(values: Tensor, kept: torch.dtype, angles: Tensor | None = None) -> Tensor:
    """Cached keys and values [T, 2, head_dim], rotated by angles [T, 2, rotary_dim / 2]."""
    count, _, head_dim = values.shape
    attention = TritonAttention(HeadShape(1, 1, head_dim, 1.0), PLACE, CAPABILITY)
    attention.allocate(CacheShape(1, 1, head_dim, 16, kept), -(-count // 16))
    batch = on_place([count], [count])
    by = NO_ANGLES if angles is None else Angles(angles, batch.positions)
    heads = torch.cat((values[:, :1], values), dim=1)
    assert attention.cache is not None
    is_rotated = angles is not None
    attention.store(heads, *attention.cache[0], is_rotated, attention.plan(batch, by))
    found = attention.cache[0].view(torch.uint8)[:, batch.slots].view(kept)
    return found.transpose(0, 1)[:, :, 0]


def numbers(dtype: torch.dtype) -> Tensor:
    """All 16-bit numbers; 32-bit numbers of every magnitude, and many between the smallest."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    torch.manual_seed(0)
    exponents = torch.randint(-20, 18, (1 << 15,))
    return torch.cat((torch.randn(1 << 15) * 2.0**exponents, torch.arange(1 << 15) / 2**24))


@pytest.mark.filterwarnings("ignore:invalid value")
@KINDS
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_nearest_number_is_stored(dtype: torch.dtype, kept: torch.dtype) -> None:
    """Ties to even; saturation, also of infinity; NaN stays NaN."""
    values = numbers(dtype).to(PLACE).view(-1, 2, WIDTH)
    found, wanted = stored(values, kept), rounded(values, kept)
    assert found.float().isinf().sum() == 0
    assert torch.equal(found.float().isnan(), values.isnan())
    is_number = ~values.isnan()
    assert torch.equal(found.view(torch.uint8)[is_number], wanted.view(torch.uint8)[is_number])


@KINDS
@pytest.mark.parametrize("rotary_dim", [80, 24])
def test_rotated_keys_are_stored(rotary_dim: int, kept: torch.dtype) -> None:
    """Rounded to the dtype of the heads, then to 8 bits."""
    torch.manual_seed(0)
    turn = torch.rand(5, rotary_dim // 2) * 6
    angles = torch.stack((turn.cos(), turn.sin()), dim=1).to(PLACE)
    values = (torch.randn(5, 2, 80) * 300).to(PLACE, torch.bfloat16)
    found, plain = (stored(values, kind, angles) for kind in (kept, torch.bfloat16))
    assert not torch.equal(plain[:, 0], values[:, 0])
    assert torch.equal(found.view(torch.uint8), rounded(plain, kept).view(torch.uint8))


@KINDS
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_numbers_are_gathered(dtype: torch.dtype, kept: torch.dtype) -> None:
    """Exactly, in the requested dtype: 32 tokens of 8 numbers each."""
    keys = torch.arange(256, dtype=torch.int32).to(PLACE, torch.uint8).view(32, 8)
    found = torch.empty(2, 24, 8, dtype=dtype, device=PLACE)
    tables, lens, starts = (
        torch.tensor(values, dtype=torch.int32, device=PLACE)
        for values in ([[1, 0], [0, 0]], [20, 4], [0, 20])
    )
    cache = keys.view(kept), keys.flip(1).contiguous().view(kept)
    options = {"WIDTH": 8, "PART": 8, "TILE": 16}
    launch(kernels.gather, (2, 2, 1), (*cache, tables, lens, starts, *found, 2), **options)
    slots = torch.tensor([*range(16, 32), *range(4), *range(4)], device=PLACE)
    for part, whole in zip(found, cache, strict=True):
        wanted = whole.view(torch.uint8)[slots].view(kept).to(dtype)
        torch.testing.assert_close(part, wanted, rtol=0, atol=0, equal_nan=True)


@TAILS
@KINDS
def test_rows_attend(lengths: list[int], kept: torch.dtype) -> None:
    """Seven query heads of 80 features share a KV head, with a window."""
    check(HeadShape(7, 1, 80, 0.1), torch.bfloat16, lengths, 40, kept=kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_attend_in_other_types(dtype: torch.dtype) -> None:
    check(HeadShape(1, 1, 64, 0.125), dtype, MIXED, kept=FLOAT8[-1])


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_the_processor_has_none(name: str) -> None:
    with pytest.raises(ModelError, match=f"^--kv-cache-dtype {name} runs on CUDA only; [^.]*$"):
        open_device("cpu", DeviceOptions("bfloat16", "bfloat16", kv_cache_dtype=name))


@pytest.mark.parametrize(
    ("name", "capability", "said"),
    [
        (None, 75, None),
        ("fp8_e5m2", 80, None),
        ("fp8_e4m3fn", 89, None),
        ("fp8_e4m3fn", 86, "capability 8.9 or newer, and this one has 8.6; .* or use fp8_e5m2$"),
        ("fp8_e5m2", 75, "capability 8.0 or newer, and this one has 7.5; leave it out$"),
        ("fp8_e4m3fn", 75, "capability 8.9 or newer, and this one has 7.5; leave it out$"),
    ],
)
def test_a_gpu_too_old_is_refused(name: str | None, capability: int, said: str | None) -> None:
    options = DeviceOptions("float16", "float16", kv_cache_dtype=name)
    if said is None:
        check_cache_dtype(options, capability)
    else:
        with pytest.raises(ModelError, match=f"^--kv-cache-dtype {name} needs a GPU of .*{said}"):
            check_cache_dtype(options, capability)
