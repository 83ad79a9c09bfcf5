"""Checkpoints that were saved without their head, as Qwen3-Embedding's, and rerankers' configs."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from text_generation_proto import pb
from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.errors import ModelError

from integration_tests.checkpoints import write_checkpoint
from integration_tests.oracle import Oracle
from shard.tests.driver import Driver, load_engine
from shard.tests.engine.test_prompt_outputs import hidden_of

IDS = list(range(3, 40))


def behead(directory: Path, **fields: Any) -> None:
    """Saved as the bare model is: no head, names without `model.`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight", None)
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(named, path, metadata={"format": "pt"})
    change(directory, **fields)


def change(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_bare_model_is_loaded(
    is_tied: bool, architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint("qwen3", tmp_path / "model", tie_word_embeddings=is_tied)
    expected = hidden_of(Oracle(path, "qwen3"), IDS)[-1].numpy()
    behead(path, architectures=[architecture])
    with caplog.at_level(logging.WARNING):
        driver = Driver(load_engine(path))
    assert ("it is an embedding model" in caplog.text) == (not is_tied)
    output = driver.add([driver.request(0, IDS, max_new_tokens=1, pooling=pb.POOLING_LAST)])
    [pooled] = output.pooled_prompts
    assert np.frombuffer(pooled.values, "<f4") == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_head_that_is_only_missing_is_an_error(tmp_path: Path) -> None:
    path = write_checkpoint("qwen3", tmp_path / "model", tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack lm_head\.weight"):
        load_engine(path)


def test_a_reranker_is_told_by_its_config(tmp_path: Path) -> None:
    path = write_checkpoint("qwen3", tmp_path / "model")
    change(path, architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(ModelError, match="Qwen3ForSequenceClassification is not built in"):
        LlamaConfig.from_hf(path)
    change(path, classifier_from_token=["no", "yes"])
    assert LlamaConfig.from_hf(path).architecture == "Qwen3ForCausalLM"


def test_tokens_that_see_what_follows_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint("qwen2", tmp_path / "model")
    change(path, is_causal=False)
    with pytest.raises(ModelError, match="is_causal is false"):
        LlamaConfig.from_hf(path)
