"""int8 weights in the CPU kernels: every number is converted exactly."""

import pytest
import torch
from numba import njit
from text_generation_shard.device.cpu.kernels import are_vectors_wide, linear
from text_generation_shard.device.cpu.kernels.llvm import BYTES, load, store
from text_generation_shard.device.cpu.kernels.tile import convert_magnitudes

pytestmark = pytest.mark.skipif(not are_vectors_wide(), reason="8 and 4 bits need AVX-512")


@pytest.mark.slow
def test_every_number_of_a_byte_is_multiplied_exactly() -> None:
    """255 one-hot inputs, one for each number; 17 outputs, which do not fill the panels."""
    numbers = torch.arange(-127, 128, dtype=torch.int8).expand(17, 255)
    weight = linear.PackedWeight(numbers, torch.full((17,), 0.5))
    out = weight(torch.eye(255, dtype=torch.bfloat16))
    assert torch.equal(out.T.float(), numbers.bfloat16().float() / 2)
    assert torch.equal(weight.rows(torch.tensor([0, 16])), numbers[:2])


def test_bytes_on_a_processor_without_tables_of_them() -> None:
    """Without AVX512_VBMI: the same bits for every magnitude and both signs."""

    @njit
    def convert(numbers, lower, upper):  # type: ignore[no-untyped-def]
        parts = convert_magnitudes(load(BYTES, numbers))
        store(parts[0], lower)
        store(parts[1], upper)

    for first in range(-128, 128, 64):
        numbers = torch.arange(first, first + 64, dtype=torch.int8)
        halves = torch.zeros(2, 64, dtype=torch.int8)
        convert(numbers.data_ptr(), halves[0].data_ptr(), halves[1].data_ptr())
        expected = (numbers & 127).bfloat16().view(torch.int8).view(64, 2)
        assert torch.equal(halves.T, expected)
