"""The prompt and the score of a reranker, and the models that are one."""

import math
from pathlib import Path

import pytest
from text_generation_router.reranker import Reranker, find_reranker, score
from text_generation_router.text.tokenizer import Tokenizer

from router.tests.serving import write_tokenizer


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
