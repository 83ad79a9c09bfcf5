"""Checkpoints as they come: with a head beside tied embeddings, in a model that also sees images,
damaged, or with code."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from text_generation_shard.errors import ModelError
from torch import Tensor

from shard.tests.driver import Driver, load_engine
from shard.tests.models.architectures import answers_of, ragged_prompts, write_architecture

pytestmark = pytest.mark.slow

PROMPTS = ragged_prompts()[3:6]


def check(path: Path, expected: Path | None = None) -> None:
    """It has transformers' tokens, or those of another checkpoint."""
    driver = Driver(load_engine(path, model_impl="transformers"))
    driver.add([driver.request(n, ids, max_new_tokens=4) for n, ids in enumerate(PROMPTS)])
    driver.run()
    for number, answer in enumerate(answers_of(expected or path, PROMPTS, 4)):
        certain = answer.num_certain
        assert driver.tokens[number][:certain] == answer.tokens[:certain]


def change(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("factor", [1.0, -1.0], ids=["equal", "another"])
def test_a_head_in_the_file_beside_tied_embeddings(factor: float, tmp_path: Path) -> None:
    path = write_architecture("gemma3_text", tmp_path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    save(path, tensors | {"lm_head.weight": factor * tensors["model.embed_tokens.weight"]})
    check(path)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_part_for_texts_of_a_model_that_sees_images(prefix: str, tmp_path: Path) -> None:
    alone = write_architecture("gemma3_text", tmp_path / "alone")
    path = tmp_path / "whole"
    path.mkdir()
    for file in alone.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    text = transformers.AutoConfig.from_pretrained(alone).to_dict()
    whole = transformers.AutoConfig.for_model("gemma3", text_config=text).to_dict()
    (path / "config.json").write_text(json.dumps(whole, default=str))
    change(path, architectures=["Gemma3ForConditionalGeneration"])
    tensors = load_file(alone / "model.safetensors")
    inner = prefix.startswith("model.")
    named = {
        prefix + (name.removeprefix("model.") if inner and name.startswith("model.") else name): one
        for name, one in tensors.items()
    }
    if inner and f"{prefix}lm_head.weight" in named:
        named["lm_head.weight"] = named.pop(f"{prefix}lm_head.weight")
    save(path, named)
    check(path, alone)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_code_that_reads_the_dtype_of_a_norm(name: str, tmp_path: Path) -> None:
    load_engine(write_architecture(name, tmp_path), model_impl="transformers", dtype="bfloat16")


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "64"},
        {"vocab_size": None},
        {"num_attention_heads": 0},
        {"max_position_embeddings": 1},
        {"rope_parameters": 5},
        {"layer_types": ["unheard_of"] * 3},
    ],
    ids=str,
)
def test_a_wrong_field_is_one_sentence(fields: dict[str, Any], tmp_path: Path) -> None:
    path = write_architecture("olmo2", tmp_path)
    change(path, **fields)
    with pytest.raises(ModelError) as caught:
        load_engine(path, model_impl="transformers")
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write_architecture("olmo2", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable"):
        load_engine(path, model_impl="transformers")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"AutoConfig": "there.Config"}, "start with --trust-remote-code"),
        ({"AutoConfig": "org/repo--there.Config"}, "code of another repository"),
    ],
)
def test_code_of_a_checkpoint_is_not_run_unasked(
    names: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    path = write_architecture("olmo2", tmp_path)
    change(path, auto_map=names, model_type="their_own", architectures=["TheirForCausalLM"])
    (path / "there.py").write_text("raise SystemExit('it runs')")
    with pytest.raises(ModelError, match=sentence):
        load_engine(path)
