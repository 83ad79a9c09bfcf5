"""Attention modules of the usual form are computed in one piece, and others are not."""

import re
from pathlib import Path

import pytest
import torch
from text_generation_shard.models.hugging_face.attention import UsualAttention

from shard.tests.driver import load_engine
from shard.tests.models.architectures import write_architecture

pytestmark = pytest.mark.slow


def is_one_call(name: str, directory: Path, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the attention of all layers of a loaded model is one call; otherwise of none."""
    with caplog.at_level("INFO"):
        load_engine(
            write_architecture(name, directory), model_impl="transformers", max_total_tokens=64
        )
    found = re.search(r"the attention of (\d) of (\d) layers is one call", caplog.text)
    assert found is not None
    assert found[1] in ("0", found[2])
    return found[1] == found[2]


# Norms of heads; windows; two ropes; caps. Pairs are rotated; norms are of all heads together.
@pytest.mark.parametrize(
    ("name", "is_usual"),
    [
        *((name, True) for name in ("llama", "qwen3", "mistral", "gemma3_text", "gemma2")),
        *((name, False) for name in ("glm4", "olmo2")),
    ],
)
def test_the_usual_form_is_found(
    name: str, is_usual: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_one_call(name, tmp_path, caplog) == is_usual


def test_a_forward_that_reads_more_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Its queries are scaled by their position, which the first thousands of tokens do not show.
    assert not is_one_call("ministral3", tmp_path, caplog)


def test_a_forward_that_computes_other_heads_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = UsualAttention.heads
    monkeypatch.setattr(UsualAttention, "heads", lambda *given: torch.neg(own(*given)))
    assert not is_one_call("llama", tmp_path, caplog)
