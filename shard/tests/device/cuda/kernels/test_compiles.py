"""The CUDA device's kernels compile for other GPUs, within their limits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from text_generation_shard.device.cuda.device import FIRST_WITH_FLOAT8

from integration_tests.marks import at_night

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[5]
# Most shared memory of a block: 163 KiB on 8.0, 99 on 8.9, 227 on 9.0 and 10.0.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
PRODUCTS = {"attend_split", "attend_prompts", "multiply"}
ON_CACHE = {"attend_split", "attend_prompts", "rotate_and_store", "gather"}
# Older GPUs do not support its dtype.
FLOAT8 = {"quantize_rows"}


@pytest.fixture(scope="module", params=[(80, 100), *at_night((89, 90))])
def capabilities(request: pytest.FixtureRequest) -> tuple[int, ...]:
    found: tuple[int, ...] = request.param
    return found


@pytest.fixture(scope="module")
def kernels(capabilities: tuple[int, ...]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "shard.tests.compile_kernels", *map(str, capabilities)]
    # The interpreter, which other tests enable, compiles nothing.
    environment = {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_all_are_compiled_for_all(
    kernels: list[dict[str, Any]], capabilities: tuple[int, ...]
) -> None:
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= PRODUCTS | FLOAT8
    assert names >= {"add_norm", "gate", "rotate_and_store", "merge_splits", "draw"}
    assert names >= {f"{name} fp8" for name in ON_CACHE} | {"attend_split deterministic"}
    for capability in capabilities:
        known = names - (FLOAT8 if capability < FIRST_WITH_FLOAT8 else set())
        assert known == {item["kernel"] for item in kernels if item["sm"] == capability}


def test_nothing_is_spilled_and_shared_memory_suffices(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert kernel["spilled"] == 0 and kernel["shared"] <= SHARED[kernel["sm"]], kernel


def test_products_are_those_of_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        if kernel["kernel"].split()[0] in PRODUCTS:
            assert kernel["products"] > 0 or kernel["first"] == "*fp32", kernel
            assert kernel["wide_loads"] > 0, kernel


def test_no_bit_of_float32_is_left_out(kernels: list[dict[str, Any]]) -> None:
    """Tensor cores use 10 bits of a float32 mantissa. On 10.0, Triton 3.7 uses them for float32
    converted from int8, against its option."""
    wide = [kernel for kernel in kernels if kernel["first"] == "*fp32"]
    if 100 in {kernel["sm"] for kernel in kernels}:
        assert ("multiply", 100) in {(kernel["kernel"], kernel["sm"]) for kernel in wide}
    assert all(kernel["products"] == 0 for kernel in wide)


def test_nothing_is_compiled_while_requests_are_served(kernels: list[dict[str, Any]]) -> None:
    """Triton specializes a kernel for 1, for multiples of 16 and for other numbers, except for
    excluded arguments. The remaining ones depend only on the model, and are the same in all
    steps."""
    of_the_model = {"vocab", "num_words", "num_parts", "num_tokens"}
    for kernel in kernels:
        assert set(kernel["special"]) <= of_the_model, kernel
