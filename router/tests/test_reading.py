"""Vectors of hidden states; the prompt and the score of a reranker, and the models that are one."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.reading import Reranker, find_reranker, pooling_of, score, vector_of
from text_generation_router.request import Pooling
from text_generation_router.text.tokenizer import Tokenizer

from router.tests.serving import write_tokenizer


@pytest.mark.parametrize(
    ("settings", "asked", "found"),
    [
        (None, None, Pooling.LAST),
        (None, "mean", Pooling.MEAN),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, None, Pooling.MEAN),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, None, Pooling.LAST),
        ({"pooling_mode": "mean"}, None, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, "last", Pooling.LAST),
    ],
)
def test_pooling_is_the_models(
    settings: dict[str, Any] | None, asked: str | None, found: Pooling, tmp_path: Path
) -> None:
    if settings is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert pooling_of(tmp_path, asked) is found


@pytest.mark.parametrize("settings", ['{"pooling_mode_cls_token": true}', "{}", "[]", "{"])
def test_a_pooling_that_is_not_known_is_refused(settings: str, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(settings)
    with pytest.raises(ValueError, match="--pooling last or --pooling mean"):
        pooling_of(tmp_path, None)


def test_a_vector_of_zeros_stays_one() -> None:
    assert list(vector_of(struct.pack("<2f", 0, 0), None, True)) == [0, 0]


def test_the_prompt_is_the_models() -> None:
    assert Reranker((1, 2)).prompt("Q", "D", None) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: Q\n<Document>: D<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\n"
    )


@pytest.mark.parametrize(("yes", "no"), [(-0.1, -3.0), (-900.0, -901.0), (-700.0, -2.0)])
def test_the_score_is_a_probability(yes: float, no: float) -> None:
    assert score((yes, no), is_raw=True) == yes - no
    assert score((yes, no), is_raw=False) == pytest.approx(1 / (1 + math.exp(no - yes)))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("some/model", False),
        ("Qwen/Qwen3-Reranker-0.6B", True),
        ("jinaai/jina-reranker-v3", False),
    ],
)
def test_rerankers_are_known_by_their_names(name: str, is_one: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ("yes", "no"))
    tokenizer = Tokenizer.load(tmp_path)
    found = find_reranker(tmp_path, name, tokenizer, False)
    assert isinstance(found, Reranker) == is_one
    assert find_reranker(tmp_path, name, tokenizer, True) == Reranker((258, 259))
    tokenizer.close()


def test_a_reranker_needs_its_words(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    found = find_reranker(tmp_path, "Qwen3-Reranker", tokenizer, False)
    assert isinstance(found, str) and "no tokens `yes` and `no`" in found
    with pytest.raises(ValueError, match="--reranker is not possible"):
        find_reranker(tmp_path, "any", tokenizer, True)
    tokenizer.close()
