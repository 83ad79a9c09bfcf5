"""The embedded model with weights in 8 and 4 bits, with default flags."""

import re

import pytest
import torch

from integration_tests.conftest import Launch

PROMPT = "<|im_start|>user\nWhat does textwrap.dedent do?<|im_end|>\n<|im_start|>assistant\n"
# All else that a shard holds is the same.
WEIGHTS_MB = {"int8": 5.4, "int4": 4.2}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_weights_answer_and_are_told(launch: Launch, quantize: str) -> None:
    handle = launch(None, "--quantize", quantize)
    handle.wait_until_ready()
    answer = handle.generate(PROMPT, max_new_tokens=40)
    assert answer["generated_text"].startswith("`dedent(text)`: Remove any common leading")
    info = handle.client.get("/info").json()
    assert info["features"]["quantization"] == f"on: {quantize}"
    assert info["model_dtype"] == "bfloat16"
    log = handle.stop()
    [held] = re.findall(r"quantized weights: ([0-9.]+) MB", log)
    # Where outputs are filled up to whole vectors it is a little more.
    assert WEIGHTS_MB[quantize] <= float(held) <= WEIGHTS_MB[quantize] + 0.1
    # Nothing of 688 inputs fits groups of 32.
    assert ("is int8 (688 inputs are not a multiple of 32), and so are 5 more" in log) == (
        quantize == "int4"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_a_gpu_answers_the_same(launch: Launch, quantize: str) -> None:
    handle = launch(None, "--device", "cuda", "--quantize", quantize)
    if quantize == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        assert handle.wait_for_exit() == 1
        assert "--quantize fp8 needs a GPU of compute capability 8.9 or newer" in handle.log
        return
    handle.wait_until_ready()
    answer = handle.generate(PROMPT, max_new_tokens=40)
    assert answer["generated_text"].startswith("`dedent(text)`: Remove any common leading")
    info = handle.client.get("/info").json()
    assert info["features"]["quantization"] == f"on: {quantize}"
    assert "quantized weights: " in handle.stop()
