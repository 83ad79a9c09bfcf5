"""A fault that changes scores ends the start: the self-check finds it, also in 16 bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_shard.device.base import Scoring
from text_generation_shard.errors import ModelError
from text_generation_shard.models.hugging_face import attention, states
from torch import Tensor

from shard.tests.driver import load_engine
from shard.tests.models.architectures import write_architecture

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
Record = Callable[[attention.Call], attention.Call]


def recording(patch: Patch, change: Record) -> None:
    """Layers want something else than the model asks for."""
    attend = attention.Probe.attend

    def changed(probe: attention.Probe, layer: int, *rest: Any) -> Tensor:
        found = attend(probe, layer, *rest)
        probe.calls[layer] = change(probe.calls[layer])
        return found

    patch.setattr(attention.Probe, "attend", changed)


def without_window(patch: Patch) -> None:
    recording(patch, lambda call: call._replace(window=None))


def with_another_window(patch: Patch) -> None:
    recording(patch, lambda call: call._replace(window=call.window and call.window - 2))


def without_caps_and_sinks(patch: Patch) -> None:
    recording(patch, lambda call: call._replace(scoring=None))


def without_sinks(patch: Patch) -> None:
    recording(patch, lambda call: call._replace(scoring=Scoring(None, None)))


def with_another_scale(patch: Patch) -> None:
    recording(patch, lambda call: call._replace(scale=2 * call.scale))


def without_states(patch: Patch) -> None:
    patch.setattr(states.RowStates, "is_empty", lambda *_: True)
    of = states.RowStates.of

    def empty(own: states.RowStates, rows: Any) -> states.PassStates:
        return states.PassStates(of(own, rows).states, is_empty=True)

    patch.setattr(states.RowStates, "of", empty)


FAULTS = {
    "gemma3_text": [without_window, with_another_scale],
    "gemma2": [without_caps_and_sinks],
    "gpt_oss": [without_sinks, without_window],
    "qwen3_5_text": [without_states],
}
CASES = [(name, fault) for name, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "fault"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_ends_the_start(
    name: str,
    fault: Callable[[Patch], None],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_architecture(name, tmp_path)
    load_engine(path, model_impl="transformers", dtype=dtype)
    fault(monkeypatch)
    with pytest.raises(ModelError, match="its scores differ from those of transformers"):
        load_engine(path, model_impl="transformers", dtype=dtype)


def test_a_window_that_is_a_little_too_short_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_architecture("gemma3_text", tmp_path)
    with_another_window(monkeypatch)
    with pytest.raises(ModelError, match="its scores differ from those of transformers"):
        load_engine(path, model_impl="transformers")


def test_scores_that_are_not_numbers_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_architecture("olmo2", tmp_path)
    attend = attention.Paged.attend

    def broken(own: attention.Paged, *given: Any) -> Tensor:
        return attend(own, *given) * torch.nan

    monkeypatch.setattr(attention.Paged, "attend", broken)
    with pytest.raises(ModelError, match="its scores differ from those of transformers"):
        load_engine(path, model_impl="transformers")
