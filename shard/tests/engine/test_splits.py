"""Every family, with heads of many numbers and sizes, on 1 to 8 ranks: refused in one sentence
before anything is loaded, or the tokens of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_shard.checkpoint.config import FAMILIES, LlamaConfig
from text_generation_shard.checkpoint.partition import partition_of
from text_generation_shard.errors import ModelError
from transformers import AutoModelForCausalLM

from integration_tests.checkpoints import write_checkpoint
from integration_tests.oracle import Oracle
from shard.tests.rank_passes import Case, key, prompt_ids, run_cases

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NAMES = ["qwen3", "llama-bias", "mistral", "qwen2", "smollm3", "phi3", "granite"]
# Heads and KV heads: a rank has one, some, all of them, or an odd number.
HEADS = [(4, 1), (5, 5), (6, 1), (6, 2), (6, 3), (8, 2), (8, 8)]
# Not all are whole vectors.
HEAD_DIMS = [8, 20, 24, 32]
SIZES = [1, 2, 3, 4, 8]
# As in `rank_passes`; some are longer than a family's window.
PROMPTS = [prompt_ids(0, 40), prompt_ids(1, 300), [7, 8, 9] * 9, prompt_ids(3, 30)]


def shapes() -> Iterator[tuple[str, tuple[int, int], int]]:
    """Families, heads, and their sizes: all sizes where heads are normed, else in turn."""
    for turn, name in enumerate(NAMES):
        for place, heads in enumerate(HEADS):
            own = HEAD_DIMS if name == "qwen3" else [HEAD_DIMS[(turn + place) % len(HEAD_DIMS)]]
            yield from ((name, heads, head_dim) for head_dim in own)


def can_be(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Whether ranks have equally many heads, and whole ones."""
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def greedy(path: Path, answers: list[list[int]]) -> Iterator[list[int]]:
    """What transformers chooses after each prompt and each token of these answers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for ids, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([[*ids, *answer]])).logits[0]
        yield logits[len(ids) - 1 : -1].argmax(-1).tolist()


def test_a_split_is_refused_or_right(tmp_path: Path) -> None:
    cases, architectures = [], set()
    for name, heads, head_dim in shapes():
        fields = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        path = tmp_path / f"{name} {heads} {head_dim}"
        fields |= {"head_dim": head_dim, "hidden_size": 120, "num_hidden_layers": 2}
        write_checkpoint(name, path, **fields)
        config = LlamaConfig.from_hf(path)
        architectures.add(config.architecture)
        sizes = [size for size in SIZES if can_be(*heads, size)]
        for size in set(SIZES) - set(sizes):
            with pytest.raises(ModelError, match=f"can not be split among {size} shards"):
                partition_of(config, 0, size)
        cases.append(Case(str(path), {"dtype": "float32"}, sizes))
    assert architectures == set(FAMILIES)
    found = run_cases(cases)
    for number, case in enumerate(cases):
        [one] = found[key(1, number)]
        assert one["tokens"] == list(greedy(Path(case.path), one["tokens"])), case.path
        for size in case.sizes:
            for rank in found[key(size, number)]:
                assert rank["tokens"] == one["tokens"], f"{size} ranks: {case.path}"


def test_one_normed_head_of_each_rank_in_fewer_bits(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24}
    path = write_checkpoint("qwen3", tmp_path / "qwen3", intermediate_size=256, **sizes)
    forms: list[dict[str, Any]] = [{"dtype": "bfloat16"}]
    forms += [{**forms[0], "quantize": quantize} for quantize in ("int8", "int4")]
    found = run_cases([Case(str(path), form, [1, 2]) for form in forms])
    exact = Oracle(path, "qwen3").logprobs(prompt_ids(0, 40))
    assert found[key(1, 0)][0]["prompt"] == pytest.approx(exact, abs=0.15)
    for number in range(len(forms)):
        [one], ranks = found[key(1, number)], found[key(2, number)]
        for rank in ranks:
            assert rank["prompt"] == pytest.approx(one["prompt"], abs=0.15)
