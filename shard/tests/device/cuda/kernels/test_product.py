"""The CUDA device's matrices: floats by one tile, int8, int4 and fp8, compared to the
definitions."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_shard.device.base import (
    DeviceOptions,
    Matrix,
)
from text_generation_shard.device.cuda import matrices
from text_generation_shard.device.cuda.device import FIRST_WITH_FLOAT8, check_quantization
from text_generation_shard.device.cuda.matrices import quantized_float8
from text_generation_shard.device.reference.matrices import (
    GROUP,
    quantize_groups,
    quantize_rows,
    quantize_rows_float8,
)
from text_generation_shard.errors import ModelError
from torch import Tensor

from shard.tests import interpreted
from shard.tests.interpreted import CAPABILITY, HAS_GPU, PLACE

pytestmark = [*interpreted.MARKS, pytest.mark.slow]
# The interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)
# None: floats, by one tile.
QUANTIZED = pytest.mark.parametrize("quantize", [None, "int8", "int4"])
NEEDS_FLOAT8 = pytest.mark.skipif(
    HAS_GPU and CAPABILITY < FIRST_WITH_FLOAT8, reason="this GPU computes nothing in fp8"
)


def weight_of(outputs: int, inputs: int) -> Tensor:
    """Rows of different sizes, as in trained matrices."""
    generator = torch.Generator().manual_seed(outputs)
    sizes = torch.rand(outputs, 1, generator=generator) + 0.1
    return (torch.randn(outputs, inputs, generator=generator) * sizes).to(PLACE)


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, inputs, generator=generator).to(PLACE, dtype)


def defined(weight: Tensor, quantize: str | None, dtype: torch.dtype) -> Tensor:
    """The dequantized weight in float32, by the reference."""
    if quantize == "int8":
        numbers, scale = quantize_rows(weight, dtype)
        return numbers.float() * scale.float()[:, None]
    if quantize == "fp8":
        numbers, scale = quantize_rows_float8(weight)
        return numbers.float() * scale[:, None]
    if quantize == "int4":
        numbers, scale, zero = quantize_groups(weight, dtype)
        groups = numbers.view(len(weight), -1, GROUP).float() - 8
        return (groups * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
    return weight.to(dtype).float()


def matrix_of(
    weight: Tensor, quantize: str | None, dtype: torch.dtype, is_deterministic: bool = False
) -> Matrix:
    options = {"quantize": quantize, "deterministic": is_deterministic or quantize is None}
    return interpreted.device(dtype, **options).matrix(weight, quantize)


def check(weight: Tensor, quantize: str | None, dtype: torch.dtype, count: int) -> None:
    matrix, (outputs, inputs) = matrix_of(weight, quantize, dtype), weight.shape
    hidden, bias = rows_of(count, inputs, dtype), rows_of(1, outputs, dtype)[0]
    wanted = hidden.double() @ defined(weight, quantize, dtype).double().t() + bias.double()
    found = matrix(hidden, bias)
    assert found.dtype == dtype and found.shape == (count, outputs)
    assert (found.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_every_tile(quantize: str | None, dtype: torch.dtype) -> None:
    """Rows, outputs and inputs that fill no whole tile and no int4 block."""
    for count in (1, 17, 257) if quantize and dtype != torch.float32 else (3, 70):
        check(weight_of(33, 160), quantize, dtype, count)


@QUANTIZED
@pytest.mark.parametrize("shape", [(1, 32), (70, 64), (30, 416)])
def test_products_of_every_size(quantize: str | None, shape: tuple[int, int]) -> None:
    check(weight_of(*shape), quantize, torch.float16, 2)


def test_floats_have_any_number_of_inputs() -> None:
    check(weight_of(21, 37), None, torch.float32, 4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_numbers_are_the_references_bit_for_bit(quantize: str) -> None:
    """One-hot rows return the dequantized weight, rounded to the dtype of the rows; with zeros,
    equal and tiny weights."""
    weight = weight_of(40, 192)
    weight[0], weight[1], weight[2, :32] = 0.0, 0.25, -3.0
    weight[3], weight[3, 5] = 0.0, 1e-6
    found = matrix_of(weight, quantize, torch.float16)(
        torch.eye(192, dtype=torch.float16, device=PLACE)
    )
    assert torch.equal(found.t(), defined(weight, quantize, torch.float16).half())


def test_large_matrices_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = weight_of(144, 64), rows_of(2, 64, torch.float32)
    whole = [matrix_of(weight, kind, torch.float32)(hidden) for kind in ("int8", "int4", "fp8")]
    monkeypatch.setattr("text_generation_shard.device.cuda.matrices._FITTED_NUMBERS", 64 * 64)
    for kind, wanted in zip(("int8", "int4", "fp8"), whole, strict=True):
        assert torch.equal(matrix_of(weight, kind, torch.float32)(hidden), wanted)


@pytest.mark.parametrize(
    ("shape", "quantize", "kind", "obstacle"),
    [
        ((50, 64), "int8", "int8", ""),
        ((64, 24), "int8", "bfloat16", "24 inputs are not a multiple of 16"),
        ((50, 64), "int4", "int4", ""),
        ((64, 48), "int4", "int8", "48 inputs are not a multiple of 32"),
        ((64, 24), "int4", "bfloat16", "24 inputs are not a multiple of 32"),
        ((64, 48), "fp8", "fp8", ""),
        ((64, 24), "fp8", "bfloat16", "24 inputs are not a multiple of 16"),
        ((50, 64), "fp8", "bfloat16", "50 outputs are not a multiple of 16"),
        ((64, 64), None, "bfloat16", ""),
    ],
)
def test_the_form_of_a_matrix(
    shape: tuple[int, int], quantize: str | None, kind: str, obstacle: str
) -> None:
    weight = weight_of(*shape)
    device = interpreted.device(torch.bfloat16, quantize=quantize)
    matrix, is_float = device.matrix(weight, quantize), kind == "bfloat16"
    assert device.quantized_form(shape, quantize) == (None if is_float else kind, obstacle)
    assert matrix.kind == kind
    # int4 blocks have 128 inputs in 4 groups.
    blocks = shape[0] * -(-shape[1] // 128)
    assert (
        matrix.nbytes
        == {
            "int8": weight.numel() + 2 * shape[0],
            "int4": blocks * (64 + 4 * 4),
            "fp8": weight.numel() + 4 * shape[0],
            "bfloat16": 2 * weight.numel(),
        }[kind]
    )


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_vectors_and_scores_of_a_vocabulary_are_int8(quantize: str) -> None:
    weight, ids = weight_of(50, 64), torch.tensor([3, 49, 3, 0], device=PLACE)
    device = interpreted.device(torch.float32, quantize=quantize)
    table = device.embedding(weight, quantize)
    matrix, nbytes = table.as_matrix()
    assert (table.kind, nbytes) == ("int8", 0)
    spelled = defined(weight, "int8", torch.float32)
    assert torch.equal(table.lookup(ids), spelled[ids])
    hidden = rows_of(2, 64, torch.float32)
    assert torch.allclose(matrix(hidden), hidden @ spelled.t(), rtol=1e-4, atol=1e-5)
    assert device.embedding(weight_of(50, 24), quantize).kind == "float32"


def test_a_tied_float_head_takes_no_memory() -> None:
    device = interpreted.device(torch.float32, deterministic=True)
    _, nbytes = device.embedding(weight_of(50, 64), None).as_matrix()
    assert nbytes == 0


@TYPES
@NEEDS_FLOAT8
def test_rows_in_fp8_are_those_of_the_reference(dtype: torch.dtype) -> None:
    """Zeros, tiny and large numbers; NaN stays NaN."""
    hidden = rows_of(6, 100, dtype)
    hidden[1], hidden[2], hidden[3] = 0.0, hidden[2] * 1e-5, hidden[3] * 1e4
    hidden[4, 7] = float("nan")
    numbers, scales = quantized_float8(hidden)
    wanted = hidden.float()
    wanted[4, 7] = 0.0
    kept, scale = quantize_rows_float8(wanted)
    assert torch.equal(scales[:, 0], scale)
    assert numbers[4, 7].float().isnan()
    numbers[4, 7] = 0.0
    assert torch.equal(numbers.view(torch.uint8), kept.view(torch.uint8))


@TYPES
@NEEDS_FLOAT8
def test_products_in_fp8(dtype: torch.dtype) -> None:
    """Compared to the product of the dequantized operands, rounded to bfloat16."""
    weight = weight_of(48, 160)
    matrix, bias = matrix_of(weight, "fp8", dtype), rows_of(1, 48, dtype)[0]
    for count in (1, 5, 17):
        hidden = rows_of(count, 160, dtype)
        wanted = defined(hidden.float(), "fp8", dtype) @ defined(weight, "fp8", dtype).t()
        for added in (None, bias):
            wanted = wanted if added is None else wanted + added.float()
            found = matrix(hidden, added)
            assert found.dtype == dtype
            assert (found.float() - wanted).norm() <= 5e-3 * wanted.norm()
        plain = hidden.float() @ weight.t() + bias.float()
        assert (wanted - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@TYPES
def test_one_tile_serves_every_number_of_rows(
    quantize: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile is a compile-time constant; without --deterministic the number of rows selects the
    tile."""
    used: set[tuple[tuple[str, Any], ...]] = set()

    def launch(kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        used.add(tuple(options.items()))

    monkeypatch.setattr(matrices, "launch", launch)
    for is_deterministic in (True, False):
        used.clear()
        matrix = matrix_of(weight_of(64, 64), quantize, dtype, is_deterministic)
        for count in (1, 2, 16, 17, 64, 65, 256, 257, 5000):
            matrix(torch.empty(count, 64, dtype=dtype, device=PLACE))
        is_one = is_deterministic or quantize is None or dtype == torch.float32
        assert len(used) == (1 if is_one else 3)


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [(None, torch.float32), ("int8", torch.bfloat16), ("int4", torch.float16)],
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    quantize: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        # On some processors, the interpreter's product sums a row in an order that depends on its
        # place in the tile.
        monkeypatch.setattr(np, "matmul", partial(np.einsum, "mk,kn->mn"))
    matrix = matrix_of(weight_of(40, 160), quantize, dtype, is_deterministic=True)
    hidden = rows_of(67, 160, dtype)
    together = matrix(hidden)
    for first, last in ((0, 1), (66, 67), (3, 20), (60, 67)):
        assert torch.equal(matrix(hidden[first:last]), together[first:last])


@pytest.mark.gpu
@QUANTIZED
@TYPES
def test_a_row_has_the_same_bits_in_large_matrices(
    quantize: str | None, dtype: torch.dtype
) -> None:
    """Sizes of real layers, on a GPU only: with as many rows as prompts have."""
    matrix = matrix_of(weight_of(4096, 4096), quantize, dtype, is_deterministic=True)
    hidden = rows_of(1000, 4096, dtype)
    together = matrix(hidden)
    for first, last in ((0, 1), (999, 1000), (130, 147), (3, 300)):
        assert torch.equal(matrix(hidden[first:last]), together[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1000, 4096)])
def test_large_products(quantize: str | None, shape: tuple[int, int]) -> None:
    """Sizes of real layers, on a GPU only, by every tile."""
    if quantize == "fp8" and (CAPABILITY < FIRST_WITH_FLOAT8 or shape[0] % 16):
        pytest.skip("not in fp8")
    for count in (1, 16, 64, 300):
        weight, hidden = weight_of(*shape), rows_of(count, shape[1], torch.bfloat16)
        found = matrix_of(weight, quantize, torch.bfloat16)(hidden)
        wanted = hidden.double() @ defined(weight, quantize, torch.bfloat16).double().t()
        bound = 0.05 if quantize == "fp8" else 1e-2
        assert (found.double() - wanted).norm() <= bound * wanted.norm()


def test_determinism_is_claimed_where_it_was_asked_for() -> None:
    for quantize in (None, "int8", "int4", "fp8"):
        assert not interpreted.device(torch.bfloat16, quantize=quantize).is_deterministic
        if quantize != "fp8":
            options = {"quantize": quantize, "deterministic": True}
            assert interpreted.device(torch.float16, **options).is_deterministic
    with pytest.raises(ModelError, match="is not supported with --quantize fp8 on"):
        interpreted.device(torch.bfloat16, quantize="fp8", deterministic=True)


def test_fp8_needs_a_gpu_that_computes_in_it() -> None:
    for quantize, capability in (("fp8", 89), ("fp8", 100), ("int8", 80), ("int4", 80)):
        check_quantization(DeviceOptions(None, "float32", quantize), capability)
    sentence = "--quantize fp8 needs a GPU of compute capability 8.9 or newer, and this one has 8.0"
    with pytest.raises(ModelError, match=f"^{sentence}; use int8 or int4$"):
        check_quantization(DeviceOptions(None, "float32", "fp8"), 80)
