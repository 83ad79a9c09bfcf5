"""A device of sixty lines, which knows the protocol and one runner alone, serves through the real
launcher."""

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.conftest import Launch
from integration_tests.marks import at_night

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "integration_tests" / "small_device.py"
# What Python runs first in every process of the server.
FIRST = """
import text_generation_shard.device
text_generation_shard.device.DEVICES["cpu"] = "integration_tests.small_device"
"""


def test_it_is_small_and_imports_the_protocol_and_the_reference_runner_alone() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) <= 61
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [node.module for node in imports if str(node.module).startswith("text_generation")]
    names = "device.base", "device.reference.runner"
    assert ours == [f"text_generation_shard.{name}" for name in names]


@pytest.mark.parametrize(
    "family",
    ["llama3", *at_night("qwen3", "mistral")],
)
def test_it_serves(
    family: str, launch: Launch, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FIRST)
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    small = launch(checkpoint(family), PYTHONPATH=os.pathsep.join(filter(None, paths)))
    usual = launch(checkpoint(family), "--device", "cpu", "--dtype", "float32")
    for handle in (small, usual):
        handle.wait_until_ready()
    assert small.client.get("/info").json()["model_device_type"] == "small"
    prompt = "".join(chr(97 + n % 26) for n in range(90))
    for parameters in (
        {"decoder_input_details": True},
        {"do_sample": True, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"top_n_tokens": 3, "stop": ["zz"]},
        {"grammar": {"type": "regex", "value": "[0-9]{3}-[0-9]{4}"}},
    ):
        answers = [
            handle.generate(prompt, max_new_tokens=20, **parameters) for handle in (small, usual)
        ]
        texts = [answer["generated_text"] for answer in answers]
        assert texts[0] == texts[1]
        prefills = [answer["details"]["prefill"] for answer in answers]
        for left, right in zip(*prefills, strict=True):
            assert left["id"] == right["id"]
            if left["logprob"] is not None:
                assert left["logprob"] == pytest.approx(right["logprob"], abs=1e-3)
    # Several at the same time, with chunked prefills.
    events = small.stream(prompt * 4, max_new_tokens=12)
    assert (
        events[-1]["generated_text"]
        == usual.stream(prompt * 4, max_new_tokens=12)[-1]["generated_text"]
    )
    for handle in (small, usual):
        handle.assert_idle()
        handle.stop()
