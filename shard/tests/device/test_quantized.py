"""int8 and int4 weights: errors, forms, and results of models."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from text_generation_shard.checkpoint.partition import whole
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device.base import Matrix
from text_generation_shard.device.cpu import kernels
from text_generation_shard.device.cpu.matrices import Int4Matrix, Int8Matrix
from text_generation_shard.device.reference.matrices import GROUP
from text_generation_shard.errors import ModelError
from text_generation_shard.models.llama import Linear
from text_generation_shard.parallel import World
from tokenizers import Tokenizer
from torch import Tensor

from shard.tests.driver import Driver, load_engine, open_cpu

ROOT = Path(__file__).parents[3]
EMBEDDED = ROOT / "launcher" / "text_generation_launcher" / "embedded_model"
QUESTIONS = ROOT / "embedded_model" / "questions.json"


def weight_of(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Rows of different sizes, as in trained matrices."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(outputs, 1, generator=generator) + 0.1
    return torch.randn(outputs, inputs, generator=generator) * sizes


def inputs_of(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inputs, generator=generator).to(dtype)


def dequantized_by(matrix: Matrix, inputs: int) -> Tensor:
    """The dequantized weight [N, K] of a matrix, computed by a product."""
    return matrix(torch.eye(inputs)).t()


SHAPES = [(16, 32), (64, 64), (80, 96), (130, 48), (576, 224)]


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_off_by_half_a_scale_at_most(shape: tuple[int, int]) -> None:
    weight = weight_of(*shape)
    spelled = dequantized_by(Int8Matrix(weight, torch.float32), shape[1])
    bound = weight.abs().amax(dim=1, keepdim=True) / 254
    assert ((spelled - weight).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("shape", [(16, 32), (64, 64), (80, 96), (576, 224)])
def test_int4_is_closer_than_rounding_between_least_and_largest(shape: tuple[int, int]) -> None:
    weight = weight_of(*shape)
    spelled = dequantized_by(Int4Matrix(weight, torch.float32), shape[1])
    groups = weight.view(shape[0], -1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    plain = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    error = (spelled - weight).view_as(groups).square().sum()
    assert error < 0.97 * (plain - groups).square().sum()
    assert error.sqrt() < 0.09 * weight.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 32), (80, 64), (208, 576)])
@pytest.mark.parametrize("form", [Int8Matrix, Int4Matrix])
def test_every_number_of_rows_is_multiplied_by_the_same_weight(
    form: type[Int8Matrix | Int4Matrix], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """From 1 row with a kernel to 150 rows with a dequantized weight; non-contiguous slices."""
    matrix = form(weight_of(*shape), dtype)
    # One-hot inputs, so that only the weight is rounded.
    spelled = torch.cat([matrix(row[None]) for row in torch.eye(shape[1], dtype=dtype)]).t()
    bias = inputs_of(1, shape[0], dtype)[0]
    for rows in (1, 2, 3, 5, 8, 9, 31, 97, 150):
        hidden = inputs_of(rows, 2 * shape[1], dtype)[:, : shape[1]]
        expected = hidden.float() @ spelled.float().t() + bias.float()
        out = matrix(hidden, bias)
        assert out.dtype == dtype and out.shape == (rows, shape[0])
        tolerance = 4e-6 if dtype == torch.float32 else 0.02
        assert (out.float() - expected).norm() <= tolerance * expected.norm()


def test_a_vocabulary_is_spelled_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for form, dtype in ((Int8Matrix, torch.bfloat16), (Int4Matrix, torch.float32)):
        matrix, hidden = form(weight_of(336, 64), dtype), inputs_of(130, 64, dtype)
        whole = matrix(hidden)
        monkeypatch.setattr("text_generation_shard.device.cpu.matrices._DEQUANTIZED_NUMBERS", 5000)
        assert torch.equal(matrix(hidden), whole)
        monkeypatch.undo()


def test_zeros_and_equal_weights_are_kept() -> None:
    weight = torch.zeros(64, 64)
    weight[1], weight[2, :32], weight[3, 5] = 0.25, -3.0, 1e-30
    for form in (Int8Matrix, Int4Matrix):
        # dtypes in which no float32 scale underflows, and in which many do.
        narrow = form(weight, torch.float16)(torch.eye(64).half()).t().float()
        assert torch.allclose(narrow[:3], weight[:3], rtol=1e-3) and not narrow[3:].any()
        spelled = dequantized_by(form(weight, torch.float32), 64)
        assert torch.allclose(spelled[:3], weight[:3], rtol=1e-5) and not spelled[4:].any()
        assert spelled.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "quantize", "kind", "obstacle"),
    [
        ((64, 64), "int8", "int8", ""),
        ((50, 64), "int8", "int8", ""),
        ((64, 24), "int8", "bfloat16", "24 inputs are not a multiple of 16"),
        ((64, 64), "int4", "int4", ""),
        ((64, 48), "int4", "int8", "48 inputs are not a multiple of 32"),
        ((50, 64), "int4", "int8", "50 outputs are not a multiple of 16"),
        ((50, 24), "int4", "bfloat16", "24 inputs are not a multiple of 32"),
        ((64, 64), None, "bfloat16", ""),
    ],
)
def test_the_form_of_a_matrix(
    shape: tuple[int, int], quantize: str | None, kind: str, obstacle: str
) -> None:
    weight = weight_of(*shape)
    device = open_cpu("bfloat16")
    matrix, is_float = device.matrix(weight, quantize), kind == "bfloat16"
    assert device.quantized_form(shape, quantize) == (None if is_float else kind, obstacle)
    assert matrix.kind == kind
    float_bytes = 1.5 if kernels.are_vectors_wide() else 2
    bytes_of = {"int8": 1, "int4": 0.625, "bfloat16": float_bytes}[kind]
    least = weight.numel() * bytes_of
    # Scales, outputs padded to a multiple of 16, and offsets of exceptions.
    assert least <= matrix.nbytes <= least + 16 * shape[1] * bytes_of + 4 * (shape[0] + 16) + 128
    hidden = inputs_of(3, shape[1], torch.bfloat16)
    expected = hidden.float() @ weight.t()
    assert (matrix(hidden).float() - expected).norm() < 0.12 * expected.norm()


@pytest.mark.slow
def test_parts_from_several_files_are_one_matrix_and_nothing_keeps_the_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {name: weight_of(16, 48, seed) for seed, name in enumerate("abc")}
    for name, weight in parts.items():
        save_file({f"{name}.weight": weight}, tmp_path / f"{name}.safetensors")
    parameters = Parameters(open_cpu("float32", "int4"), "int4")
    linear = Linear(parameters, World(), {name: [whole(16)] for name in "bca"}, whole(48))
    with caplog.at_level(logging.INFO):
        parameters.load(tmp_path)
    assert parameters.nbytes == 48 * (48 + 4)
    hidden = inputs_of(5, 48, torch.float32)
    expected = hidden @ torch.cat([parts[name] for name in "bca"]).t()
    assert (linear(hidden) - expected).norm() < 0.02 * expected.norm()
    assert "matrices: 1 int8" in caplog.text
    assert "not int4: a.weight is int8 (48 inputs are not a multiple of 32)" in caplog.text


def test_fp8_is_for_gpus() -> None:
    sentence = "--quantize fp8 runs on a GPU only; use int8 or int4, or --device cuda"
    with pytest.raises(ModelError, match=f"^{sentence}$"):
        open_cpu("bfloat16", "fp8")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "phi3"])
@pytest.mark.slow
def test_families_are_served(family: str, quantize: str, checkpoint: Callable[[str], Path]) -> None:
    """Biases, fused projections, tied and untied heads: close to the float model. The limits lie
    between the errors of a quantized model and those of another model.
    """
    logprobs = []
    for how in (None, quantize):
        driver = Driver(load_engine(checkpoint(family), quantize=how))
        ids = list(range(5, 45))
        driver.add([driver.request(1, ids, max_new_tokens=4, prefill_logprobs=True)])
        driver.run()
        assert len(driver.tokens[1]) == 4
        logprobs.append(torch.tensor(driver.prefill_logprobs[1][1:]))
    assert not torch.equal(*logprobs)
    assert (logprobs[0] - logprobs[1]).abs().mean() < {"int8": 0.15, "int4": 1.0}[quantize]


def test_quantised_weights_are_computed_in_bfloat16_unless_told(tiny_model_path: Path) -> None:
    assert load_engine(tiny_model_path, quantize="int8", dtype=None).device.dtype == torch.bfloat16
    assert load_engine(tiny_model_path, quantize="int8").device.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_embedded_model_answers_as_before(quantize: str) -> None:
    """Quantization changes neither the answers nor, noticeably, the loss."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    questions = json.loads(QUESTIONS.read_text(encoding="utf-8"))[:20]
    source = tokenizer.encode(Path(json.__file__).read_text(encoding="utf-8")).ids[:350]
    losses = []
    for how in (None, quantize):
        driver = Driver(load_engine(EMBEDDED, quantize=how, dtype="bfloat16"))
        driver.add([driver.request(99, source, max_new_tokens=1, prefill_logprobs=True)])
        losses.append(-sum(driver.prefill_logprobs[99][1:]) / (len(source) - 1))
    for index, question in enumerate(questions):
        prompt = f"<|im_start|>user\n{question['question']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(prompt).ids
        driver.add([driver.request(index, ids, max_new_tokens=40)])
    driver.run()
    for index, question in enumerate(questions):
        answer = tokenizer.decode(driver.tokens[index]).lstrip("\n")
        assert f"`{question['signature']}`".startswith(answer[:60]) or answer.startswith(
            f"`{question['signature']}`"
        )
    assert losses[1] == pytest.approx(losses[0], abs={"int8": 0.01, "int4": 0.04}[quantize])
