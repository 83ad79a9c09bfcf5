"""A model that transformers computes has the same tokens with two ranks, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from text_generation_process.flags import ShardConfig
from text_generation_shard.errors import ModelError
from text_generation_shard.models.hugging_face.products import check_plan
from text_generation_shard.models.registry import load_model, read_config
from text_generation_shard.parallel import World

from shard.tests.driver import reference_device
from shard.tests.models.architectures import write_architecture
from shard.tests.rank_passes import Case, key, run_cases

pytestmark = pytest.mark.slow

# Norms of whole queries, which are gathered; experts.
NAMES = ("olmo2", "qwen3_moe")
MORE = (
    # Windows and caps; a joined feed-forward; biases behind sums; states.
    *("gemma2", "glm4", "ernie4_5", "qwen3_5_text"),
    *("apertus", "arcee", "codegen", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5_moe"),
    *("exaone4", "exaone_moe", "gemma", "gemma3_text", "gemma4_text", "glm"),
    *("glm4_moe", "gpt_neox", "gptj", "granitemoe", "granitemoehybrid", "helium", "lfm2_moe"),
    *("minicpm3", "minimax_m2", "mixtral", "nemotron_h", "olmo", "olmoe", "phi", "phimoe"),
    *("qwen2_moe", "qwen3_next", "seed_oss", "starcoder2", "vaultgemma"),
)
FORMS = ({"dtype": "float32"}, {"dtype": "float32", "quantize": "int8"})
INT4 = {"dtype": "float32", "quantize": "int4"}
SETTINGS: dict[str, Any] = {"model_impl": "transformers"}


def failures(names: tuple[str, ...], folder: Path) -> list[str]:
    """The cases in which a rank of two has other tokens than one rank."""
    # A vocabulary that 2 does not divide; features whose half can be int4 or int8.
    fields: dict[str, Any] = {
        "glm4": {"intermediate_size": 128},
        "olmo2": {"vocab_size": 301},
        "qwen3_next": {"shared_expert_intermediate_size": 64},
    }
    paths = [write_architecture(name, folder / name, **fields.get(name, {})) for name in names]
    pairs = [(path, form) for path in paths for form in FORMS]
    pairs += [(path, INT4) for path in paths if path.name == "glm4"]
    cases = [Case(str(path), {**SETTINGS, **form}, [1, 2]) for path, form in pairs]
    found = run_cases(cases)
    wrong = []
    for number, case in enumerate(cases):
        [one], ranks = found[key(1, number)], found[key(2, number)]
        near = pytest.approx(one["prompt"], abs=1e-3)
        if any(rank["tokens"] != one["tokens"] or rank["prompt"] != near for rank in ranks):
            wrong.append(f"{case.path} {case.form}")
    return wrong


@pytest.mark.slow
def test_two_ranks_have_the_tokens_of_one(tmp_path: Path) -> None:
    assert failures(NAMES, tmp_path) == []


@pytest.mark.nightly
def test_two_ranks_of_any_plan_have_the_tokens_of_one(tmp_path: Path) -> None:
    assert failures(MORE, tmp_path) == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gpt2", "has no layers"),
        ("gpt_oss", "has no layers"),
        ("gemma3n_text", "changes its scores"),
    ],
)
def test_what_can_not_be_split_is_refused_before_it_is_loaded(
    name: str, fault: str, tmp_path: Path
) -> None:
    config = ShardConfig(write_architecture(name, tmp_path), world_size=2, **SETTINGS)
    with pytest.raises(ModelError, match=rf"can not be split among shards, .* {fault}; use --num"):
        read_config(config)


@pytest.mark.parametrize(
    ("size", "settings", "sentence"),
    [
        (3, {}, "Gemma2ForCausalLM can not be split among 3 shards; numbers that work: 1, 2"),
        (2, {"num_key_value_heads": 1}, "numbers that work: 1"),
        (4, {}, "numbers that work: 1, 2"),
    ],
)
def test_heads_are_not_cut(
    size: int, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_architecture("gemma2", tmp_path, **settings)
    chosen = read_config(ShardConfig(path, world_size=size, **SETTINGS))
    with pytest.raises(ModelError, match=f"{sentence}$"):
        load_model(path, chosen, reference_device(), World(0, size), None)


def test_a_kind_that_is_not_known_is_named() -> None:
    plan: dict[str, Any] = {"model.layers.*.up_proj": "colwise", "norm": "sequence_parallel"}
    with pytest.raises(ModelError, match=r"ACausalLM can not .* the kind sequence_parallel; use"):
        check_plan(plan, "ACausalLM")
