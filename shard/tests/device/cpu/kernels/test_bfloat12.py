"""bfloat16 weights in 12 bits: lossless, with the same sums as 16 bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from text_generation_shard.device.cpu.kernels import are_vectors_wide, vector
from text_generation_shard.device.cpu.kernels.bfloat12 import narrow
from text_generation_shard.device.cpu.kernels.vector import BFLOAT16
from text_generation_shard.device.cpu.matrices import PackedWeight, pack
from torch import Tensor

pytestmark = pytest.mark.skipif(not are_vectors_wide(), reason="12 bits need AVX-512")

LAUNCHER = Path(__file__).parents[5] / "launcher"
ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 24, 31, 32, 40, 70, 241, 300]
# Exponents of bfloat16.
LARGEST = 160


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bits(sign: Tensor, exponent: Tensor, mantissa: Tensor) -> Tensor:
    """Build bfloat16 from sign, exponent and mantissa."""
    return (sign * 2**15 + exponent * 2**7 + mantissa).numpy().astype(np.uint16)


def any_numbers(*size: int) -> Tensor:
    """A wider range of magnitudes than real weights of an output have."""
    parts = (torch.randint(0, end, size) for end in (2, LARGEST + 1, 2**7))
    sign, exponent, mantissa = parts
    # Subnormal numbers are 0, or count as 0 in products.
    numbers = bits(sign, exponent, torch.where(exponent == 0, 0, mantissa))
    return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)


def weights(outputs: int, inputs: int) -> Tensor:
    """Like real weights, except for an output of zeros, one of very small numbers, one of large
    numbers, and one number much smaller than its output's largest."""
    weight = torch.randn(outputs, inputs) * 0.02
    weight[1], weight[2], weight[3] = 0, weight[2] * 1e-30, weight[3] * 1e6
    weight[4] *= 1e-5
    weight[4, -1] = 1
    return weight.bfloat16()


@pytest.mark.parametrize("size", [(16, 8), (48, 52), (33, 50), (960, 64)])
@pytest.mark.slow
def test_no_number_is_changed(size: tuple[int, int]) -> None:
    inputs = torch.eye(size[1], dtype=torch.bfloat16)
    for weight in (weights(*size), any_numbers(*size)):
        out = PackedWeight(weight)(inputs).T
        assert torch.equal(out, weight)


@pytest.mark.slow
def test_sums_are_those_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit if every number has a code: no number is 2 ** 14 times smaller than another."""
    weight = (0.001 + torch.rand(320, 96)) * torch.randint(-1, 2, (320, 96))
    weight = weight.bfloat16()
    assert PackedWeight(weight).nbytes < 0.8 * weight.nbytes
    narrowed = [PackedWeight(weight, is_gated=gated) for gated in (False, True)]
    monkeypatch.setattr(vector, "weights_marker", lambda dtype: BFLOAT16)
    plain = [PackedWeight(weight, is_gated=gated) for gated in (False, True)]
    for rows in ROWS:
        hidden = torch.randn(rows, 96, dtype=torch.bfloat16)
        for ours, theirs in zip(narrowed, plain, strict=True):
            assert torch.equal(ours(hidden), theirs(hidden))


@pytest.mark.parametrize("is_gated", [False, True])
def test_exceptions_are_added_alike_in_any_batch(is_gated: bool) -> None:
    weight = weights(96, 72)
    assert len(narrow(pack(weight, 4)).beside) > 36 * 8
    packed = PackedWeight(weight, is_gated=is_gated)
    hidden = torch.randn(max(ROWS), 72, dtype=torch.bfloat16)
    together = packed(hidden)
    for rows in ROWS:
        assert torch.equal(packed(hidden[-rows:]), together[-rows:])
    if not is_gated:
        exact = hidden.double() @ weight.double().T
        scale = hidden.double().abs() @ weight.double().abs().T
        assert ((together.double() - exact).abs() <= 0.005 * scale).all()


def test_numbers_that_are_not_finite_stay_so() -> None:
    weight = torch.full((16, 8), 0.5, dtype=torch.bfloat16)
    weight[0, 3], weight[1, 3], weight[2, 3] = float("inf"), float("-inf"), float("nan")
    out = PackedWeight(weight)(torch.ones(1, 8, dtype=torch.bfloat16))[0]
    assert out[0] == float("inf") and out[1] == float("-inf") and out[2].isnan()
    assert (out[3:] == 4).all()


def test_a_trained_model_takes_three_quarters() -> None:
    """Few exceptions."""
    path = LAUNCHER / "text_generation_launcher" / "embedded_model" / "model.safetensors"
    plain, narrowed = 0, 0
    for weight in load_file(path).values():
        if weight.dim() == 2:
            plain += 2 * weight.numel()
            narrowed += PackedWeight(weight.bfloat16()).nbytes
    assert 0.75 * plain < narrowed < 0.78 * plain
