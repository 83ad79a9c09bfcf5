"""The committed checkpoint, and the corpus it was trained on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from embedded_model.corpus import build_entries
from embedded_model.dialogue import chat_exchange

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "launcher" / "text_generation_launcher" / "embedded_model"
TRAINING = ROOT / "embedded_model"
PRINT_SCRIPT = (
    "from embedded_model.corpus import build_entries\n"
    "print(*map(repr, build_entries()), sep='\\n')\n"
)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def entries() -> dict[str, Any]:
    """The corpus, by name."""
    return {entry.name: entry for entry in build_entries()}


def test_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.rglob("*")) <= 12_000_000


@pytest.mark.slow
def test_checkpoint_is_a_llama_in_bfloat16() -> None:
    config = read_json(MODEL / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] == 4096
    assert config["max_position_embeddings"] >= 1024
    shapes: dict[str, list[int]] = {}
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            assert weights.get_slice(name).get_dtype() == "BF16"
            shapes[name] = weights.get_slice(name).get_shape()
    # Tied: the head is the embedding.
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in shapes
    assert shapes["model.embed_tokens.weight"] == [4096, config["hidden_size"]]
    assert 4_500_000 < sum(map(math.prod, shapes.values())) < 6_500_000


def test_tokenizer_round_trips_and_knows_its_special_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    config = read_json(MODEL / "config.json")
    assert tokenizer.get_vocab_size() == 4096
    text = "def f(x):\n    return 'é ☃' + x\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert config["eos_token_id"] == ends
    assert read_json(MODEL / "generation_config.json")["eos_token_id"] == ends


def test_exchange_is_what_the_chat_template_renders(entries: dict[str, Any]) -> None:
    template = jinja2.Template(read_json(MODEL / "tokenizer_config.json")["chat_template"])
    answer = entries["textwrap.dedent"].answer
    exchange = chat_exchange("What?", answer)
    message = {"role": "user", "content": "What?"}
    assert exchange.prompt == template.render(messages=[message], add_generation_prompt=True)
    assert exchange.completion == f"{answer}<|im_end|>"


@pytest.mark.slow
def test_corpus_is_the_same_in_another_process(entries: dict[str, Any]) -> None:
    # A different hash seed, which changes the order of sets.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", PRINT_SCRIPT],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    # pytest replaces the interpreter's hooks by its own functions.
    here = [repr(entry) for name, entry in entries.items() if not name.endswith("hook")]
    assert [line for line in printed if "hook', signature" not in line] == here
