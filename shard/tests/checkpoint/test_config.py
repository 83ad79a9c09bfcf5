"""Every wrong field of a model's files is one sentence that names it, before weights are read."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from text_generation_process.flags import ShardConfig
from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.files import read_vocabulary
from text_generation_shard.checkpoint.weights import has_tied_head
from text_generation_shard.errors import ModelError
from text_generation_shard.server import load_engine as load

from integration_tests.checkpoints import write_checkpoint
from integration_tests.marks import at_night
from shard.tests.driver import DEVICES, Driver, load_engine

WRONG = (None, "x", ["x"], {"x": 1}, -1, 10**40, True)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}


def write(directory: Path, **fields: Any) -> Path:
    """A config.json of a Llama with these fields."""
    content = {"model_type": "llama", **SIZES, **fields}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def places(content: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The path of each field, and of those in objects."""
    for name, value in content.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, inner) for inner in value)


def set_in(content: dict[str, Any], place: tuple[str, ...], value: object) -> dict[str, Any]:
    """A copy with another value there."""
    copy = json.loads(json.dumps(content))
    holder = copy
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = value
    return copy


@pytest.mark.parametrize("file", ["config", "generation_config", "tokenizer_config"])
@pytest.mark.parametrize(
    "family",
    ["phi3-longrope", *at_night("llama3", "smollm3-sliding", "granite")],
)
def test_a_wrong_field_works_or_is_named(family: str, file: str, tmp_path: Path) -> None:
    path = write_checkpoint(family, tmp_path / "model") / f"{file}.json"
    given = json.loads(path.read_text())
    if file == "config":
        names = ("quantization_config", "rope_scaling", "no_rope_layers", "torch_dtype")
        given = dict.fromkeys(names) | given
    for place in places(given):
        for value in WRONG:
            path.write_text(json.dumps(set_in(given, place, value)))
            try:
                LlamaConfig.from_hf(path.parent)
            except ModelError as error:
                sentence = str(error)
                assert "\n" not in sentence, (place, value)
                assert place[-1] in sentence or "architecture x" in sentence, (place, value)
                continue
            try:
                load(ShardConfig(model_path=path.parent, device="cpu", dtype="float32"))
            except ModelError as error:
                # What only the weights contradict, and activations.
                assert "\n" not in str(error), (place, value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rope_theta": None}, "`rope_theta` in .*config.json is null; expected a number above 1"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, '`rope_theta` in .* is "1e4"'),
        ({"rope_scaling": "yarn"}, '`rope_scaling` in .* is "yarn"; expected an object'),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, '`type` in `rope_scaling` .* is "ntk"'),
        ({"rope_scaling": {"type": "linear"}}, "`rope_scaling` of .* has no `factor`"),
        ({"rope_scaling": {"type": "dynamic", "factor": "4"}}, '`factor` in .* is "4"'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "has no `low_freq_factor`"),
        ({"rope_scaling": {"type": "longrope"}}, "has no `short_factor`"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "partial_rotary_factor": 0.5},
            "`partial_rotary_factor` in .* is 0.5; expected none",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "has no `short_factor`",
        ),
        ({"head_dim": 33}, "rotates 33 of the 33 features of a head"),
        ({"architectures": "LlamaForCausalLM"}, "`architectures` in .*; expected a list of texts"),
        ({"num_key_value_heads": 3}, "a divisor of the 4 attention heads"),
        ({"num_hidden_layers": 10**9}, "a whole number from 1 to 10000"),
    ],
)
def test_a_model_that_can_not_be_served_is_named(
    fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=sentence):
        LlamaConfig.from_hf(write(tmp_path, **fields))


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.5}, 1280),
        ({"rope_type": "dynamic", "factor": 1e30}, 2**31 - 1),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_a_scaled_rope_has_a_longer_context(
    rope: dict[str, Any], context: int, tmp_path: Path
) -> None:
    assert LlamaConfig.from_hf(write(tmp_path, rope_scaling=rope)).max_position == context


def test_ignored_fields_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "logits_scaling": 2.0,
    }
    with caplog.at_level(logging.WARNING):
        config = LlamaConfig.from_hf(write(tmp_path, **fields))
    assert (config.rope.theta, config.logits_divisor) == (10000.0, 1.0)
    assert "`rope_theta` is 10000, not 1000000.0" in caplog.text
    assert "`logits_scaling` in" in caplog.text
    caplog.clear()
    LlamaConfig.from_hf(write(tmp_path, partial_rotary_factor=0.5))
    assert "`partial_rotary_factor` in" in caplog.text


@pytest.mark.parametrize(
    ("of_generation", "of_config", "of_tokenizer", "expected"),
    [
        (0, 1, "<|im_end|>", (0, 2)),
        ([0, 1], None, "<|im_end|>", (0, 1, 2)),
        (None, 1, "<|im_end|>", (1, 2)),
        ([], [1, 0], {"content": "<|im_end|>"}, (1, 0, 2)),
        (None, None, "<|im_end|>", (2,)),
        (2, 2, "<|im_end|>", (2,)),
        (0, None, "<not a token>", (0,)),
        (0, None, 7, (0,)),
        ([-1, 10**30, 1], None, None, (1,)),
        (None, None, None, ()),
    ],
)
def test_a_text_ends_at_the_end_tokens_of_all_files(
    of_generation: object,
    of_config: object,
    of_tokenizer: object,
    expected: tuple[int, ...],
    tmp_path: Path,
    tiny_model_path: Path,
) -> None:
    write(tmp_path, eos_token_id=of_config)
    (tmp_path / "tokenizer.json").write_bytes((tiny_model_path / "tokenizer.json").read_bytes())
    for name, content in {
        "generation_config.json": {"eos_token_id": of_generation},
        "tokenizer_config.json": {"eos_token": of_tokenizer},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert LlamaConfig.from_hf(tmp_path).eos_token_ids == expected


def test_without_a_tokenizer_the_config_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig.from_hf(write(tmp_path, eos_token_id=[3]))
    assert (config.eos_token_ids, config.unused_ids) == ((3,), ())
    assert not caplog.text
    LlamaConfig.from_hf(write(tmp_path))
    assert "no file names an end token" in caplog.text


def test_an_added_token_without_a_text_is_not_counted(tmp_path: Path) -> None:
    added = [{"content": content, "id": 3 + n} for n, content in enumerate(("a", ["b"], None))]
    content = {"model": {"vocab": {"x": 0}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert read_vocabulary(tmp_path).ids == {0, 3}


@pytest.mark.parametrize("device", DEVICES)
def test_ids_without_a_token_are_never_chosen(device: str, tmp_path: Path) -> None:
    path = write_checkpoint("llama3", tmp_path / "model")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    unused = {100, *range(280, 300)}
    tokenizer["model"]["vocab"] = {text: i for text, i in tokens.items() if i not in unused}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    driver = Driver(load_engine(path, device=device))
    assert driver.engine.model.config.unused_ids == (100, *range(280, 300))
    for seed in range(4):
        sampling = {"do_sample": True, "temperature": 100.0, "seed": seed}
        options = {"max_new_tokens": 90, "ignore_eos_token": True, "sampling": sampling}
        driver.add([driver.request(seed, [5, 290], **options)])
    driver.run()
    chosen = {token for tokens in driver.tokens.values() for token in tokens}
    assert len(chosen) > 100 and chosen.isdisjoint(unused)


def test_a_copy_of_the_embeddings_is_no_own_head(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama3")
    assert has_tied_head(path, is_tied=True)
    tensors = load_file(path / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    for head, is_own in ((embeddings.clone(), False), (embeddings.bfloat16(), True)):
        copy = path.parent / f"head-{is_own}"
        copy.mkdir(exist_ok=True)
        save_file(tensors | {"lm_head.weight": head}, copy / "model.safetensors")
        assert has_tied_head(copy, is_tied=True) != is_own
