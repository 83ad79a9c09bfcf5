"""Every device computes the results of the definitions, in the same cases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from text_generation_shard.device import open_device
from text_generation_shard.device.base import Activation, Angles, CacheShape, DeviceOptions
from text_generation_shard.device.reference.device import Device
from torch import Tensor

from shard.tests import interpreted
from shard.tests.device.test_attention import BLOCK, expected, make_batch, to_device
from shard.tests.driver import Driver, load_engine, reference_device

# Relative tolerance of results.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.004}


def opened(name: str, dtype: str) -> Callable[[], Device]:
    return lambda: open_device(name, DeviceOptions(dtype, "float32"))


GPU = pytest.mark.gpu
DEVICES = {
    "reference": reference_device,
    "cpu-float32": opened("cpu", "float32"),
    "cpu-bfloat16": opened("cpu", "bfloat16"),
    "cuda-float32": opened("cuda", "float32"),
    "cuda-bfloat16": opened("cuda", "bfloat16"),
}


# The GPU's kernels on the CPU, which are too slow for large cases.
INTERPRETED = {
    "interpreted-float32": lambda: interpreted.device(torch.float32),
    "interpreted-bfloat16": lambda: interpreted.device(torch.bfloat16),
}
NAMES = [pytest.param(name, marks=[GPU] if "cuda" in name else []) for name in DEVICES]


@pytest.fixture(scope="module", params=NAMES)
def device(request: pytest.FixtureRequest) -> Device:
    return DEVICES[request.param]()


@pytest.fixture(scope="module", params=[*NAMES, *INTERPRETED])
def any_device(request: pytest.FixtureRequest) -> Device:
    return (DEVICES | INTERPRETED)[request.param]()


def on(device: Device, *shape: int) -> Tensor:
    """Random numbers in the device's dtype."""
    return torch.randn(*shape).to(device.torch_device, device.dtype)


def close(device: Device, found: Tensor, definition: Tensor) -> None:
    definition = definition.to(found.device)
    assert (found.double() - definition).norm() <= TOLERANCE[device.dtype] * definition.norm()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("shape", [(96, 64), (50, 48), (33, 160)])
def test_a_matrix_multiplies(any_device: Device, rows: int, shape: tuple[int, int]) -> None:
    device = any_device
    weight, hidden, bias = torch.randn(shape), on(device, rows, shape[1]), on(device, shape[0])
    matrix = device.matrix(weight.to(device.torch_device, device.dtype), None)
    kept = weight.to(device.dtype).double()
    plain = hidden.cpu().double() @ kept.t()
    close(device, matrix(hidden), plain)
    close(device, matrix(hidden, bias), plain + bias.cpu().double())
    assert matrix.kind == str(device.dtype).removeprefix("torch.") and matrix.nbytes > 0


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda gate: F.gelu(gate, approximate="tanh"),
    Activation.RELU: F.relu,
}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [64, 40])
def test_a_gated_matrix_multiplies(
    any_device: Device, activation: Activation, has_bias: bool, size: int
) -> None:
    device = any_device
    weight, hidden = on(device, 2 * size, 64) / 8, on(device, 7, 64)
    bias = on(device, 2 * size) if has_bias else None
    out = device.gated_matrix(weight, None, activation, has_bias)(hidden, bias)
    gate, up = F.linear(
        hidden.double(), weight.double(), None if bias is None else bias.double()
    ).chunk(2, dim=1)
    close(device, out, ACTIVATIONS[activation](gate) * up)


def test_an_embedding_is_looked_up_and_multiplied(any_device: Device) -> None:
    device = any_device
    weight = on(device, 50, 64)
    table, ids = device.embedding(weight, None), torch.tensor([3, 49, 3, 0])
    ids = ids.to(device.torch_device)
    assert torch.equal(table.lookup(ids), weight[ids])
    hidden, (matrix, nbytes) = on(device, 3, 64), table.as_matrix()
    close(device, matrix(hidden), hidden.double() @ weight.double().t())
    assert nbytes in (0, matrix.nbytes)


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_a_norm_takes_in_what_a_block_adds(any_device: Device, multiplier: float) -> None:
    device = any_device
    hidden, delta = on(device, 9, 48), on(device, 9, 48)
    weight, total = torch.rand(48).to(device.torch_device), hidden.double()
    for added in (None, delta):
        total = total if added is None else total + added.double() * multiplier
        out = device.add_norm(hidden, added, multiplier, weight, 1e-5)
        rms = total.square().mean(dim=1, keepdim=True).add(1e-5).sqrt()
        close(device, out, total / rms * weight)
        close(device, hidden, total)


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads [T, n, head_dim] by angles [T, rotary_dim / 2]."""
    half = angles.shape[1]
    first, second, rest = heads.split((half, half, heads.shape[2] - 2 * half), dim=2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2)


def check_attention(
    device: Device, window: int | None, tails: list[int], rotary_dim: int = 0
) -> None:
    heads, kv_heads, head_dim = 6, 2, 16
    # The longest two split a decode pass into several groups by length.
    contexts = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 15 * BLOCK, 7]
    attention = device.attention(heads, kv_heads, head_dim, 0.25)
    attention.allocate(CacheShape(2, kv_heads, head_dim, BLOCK, device.dtype), 128)
    rows = [on(device, length, heads + 2 * kv_heads, head_dim) for length in contexts]
    lengths = [min(tails[row % len(tails)], length) for row, length in enumerate(contexts)]
    turn = torch.rand(max(contexts), rotary_dim // 2) * 6
    table = torch.stack((turn.cos(), turn.sin()), dim=1).to(device.torch_device)
    # An earlier pass wrote everything before the last tokens.
    for counts in (contexts, lengths):
        is_decode = counts is lengths and tails == [1]
        batch = to_device(make_batch(contexts, counts, is_decode), str(device.torch_device))
        passed = torch.cat([row[-count:] for row, count in zip(rows, counts, strict=True)])
        plan = attention.plan(batch, Angles(table, batch.positions))
        found = attention.forward(passed, 1, window, rotary_dim > 0, plan)
    definition = []
    for row, count in zip(rows, lengths, strict=True):
        query, key, value = row.cpu().double().split([heads, kv_heads, kv_heads], dim=1)
        angles = turn[: len(row)].double()
        query, key = rotated(query, angles) * 0.25, rotated(key, angles)
        definition.append(expected(query[-count:], key, value, window).flatten(1))
    close(device, found, torch.cat(definition))


# Decoding rows, rows that verify draft tokens, and parts of prompts in one pass.
MIXED = [1, 2, 40, 3, 17, 1, 60, 16]


@pytest.mark.parametrize("window", [None, 1, 7, BLOCK, 1000])
@pytest.mark.parametrize(
    "tails", [[1], [5], [10**6], MIXED], ids=["decode", "continued", "whole", "mixed"]
)
def test_attention_is_paged(device: Device, window: int | None, tails: list[int]) -> None:
    check_attention(device, window, tails)


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("tails", [[1], MIXED], ids=["decode", "mixed"])
def test_queries_and_keys_are_rotated(device: Device, rotary_dim: int, tails: list[int]) -> None:
    check_attention(device, None, tails, rotary_dim)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "phi3", "granite", "mistral"])
@pytest.mark.slow
def test_a_model_says_what_it_says_by_the_reference(
    device: Device, family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Parts of prompts together with decoding rows; log-probabilities of a prompt and its
    continuation."""
    found = []
    for own in (reference_device(), device):
        driver = Driver(load_engine(checkpoint(family), device=own, max_prefill_tokens=24))
        options: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos_token": True}
        driver.add([driver.request(0, range(5, 60), prefill_logprobs=True, **options)])
        driver.add([driver.request(1, range(40, 50), **options)], driver.advance({}))
        driver.run()
        assert [len(tokens) for tokens in driver.tokens.values()] == [5, 5]
        found.append(torch.tensor(driver.prefill_logprobs[0][1:]))
    bound = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[device.dtype]
    assert (found[0] - found[1]).abs().mean() < bound
