"""Pooled hidden states and scores equal those of transformers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_proto import pb
from text_generation_shard.arrays import Floats
from text_generation_shard.engine import step as steps
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.errors import BatchError
from torch import Tensor

from integration_tests.oracle import Oracle
from shard.tests.driver import DEVICES, Driver, changed, load_engine, new_request, step_of

LENGTHS = (1, 3, 16, 17, 40, 90)
PROMPTS = [[3 + (7 * place + 11 * n) % 90 for place in range(n)] for n in LENGTHS]
SCORED = (5, 9, 250)
WANTED: Mapping[str, Any] = {"max_new_tokens": 1, "score_token_ids": SCORED}


def vectors(output: pb.StepResponse) -> dict[int, Floats]:
    return {item.request_id: np.frombuffer(item.values, "<f4") for item in output.pooled_prompts}


def scored(output: pb.StepResponse) -> dict[int, list[float]]:
    return {item.request_id: list(item.logprobs) for item in output.token_scores}


def hidden_of(oracle: Oracle, ids: Sequence[int]) -> Tensor:
    """The hidden states after the last norm [T, hidden_size]."""
    with torch.no_grad():
        model: Any = oracle._fresh()
        found: Tensor = model.model(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def scores_of(oracle: Oracle, ids: Sequence[int]) -> list[float]:
    """The log-probabilities of SCORED after a prompt."""
    with torch.no_grad():
        logits = oracle._fresh()(torch.tensor([list(ids)])).logits[0, -1]
    found: list[float] = logits.log_softmax(-1)[list(SCORED)].tolist()
    return found


def assert_right(oracle: Oracle, ids: Sequence[int], pooling: pb.Pooling, found: Floats) -> None:
    hidden = hidden_of(oracle, ids)
    wanted = hidden.mean(0) if pooling == pb.POOLING_MEAN else hidden[-1]
    assert found == pytest.approx(wanted.numpy(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama3", "qwen3", "granite", "phi3", "mistral"])
def test_equals_transformers_beside_generation(
    family: str, device: str, checkpoint: Callable[[str], Path]
) -> None:
    """In passes of 37 tokens and in chunks of 7, while another request gets its tokens."""
    path = checkpoint(family)
    oracle = Oracle(path, family)
    driver = Driver(load_engine(path, max_prefill_tokens=37, device=device))
    other: Mapping[str, Any] = {"max_new_tokens": 24, "ignore_eos_token": True}
    driver.add([driver.request(100, PROMPTS[-1], **other)])
    driver.run()
    driver.add([driver.request(200, PROMPTS[-1], **other)])
    driver.step()
    for pooling in (pb.POOLING_LAST, pb.POOLING_MEAN):
        requests = [
            driver.request(10 * pooling + n, ids, pooling=pooling, **WANTED)
            for n, ids in enumerate(PROMPTS)
        ]
        whole = driver.add(requests[:-1], driver.advance({}))
        in_parts = driver.add([driver.part(requests[-1], 7)], driver.advance({}))
        assert not in_parts.pooled_prompts and not in_parts.token_scores
        last = requests[-1].id
        while driver.left[last]:
            part = driver.step({last: min(31, driver.left[last])})
        found, scores = vectors(whole) | vectors(part), scored(whole) | scored(part)
        assert list(found) == list(scores) == [request.id for request in requests]
        for request, ids in zip(requests, PROMPTS, strict=True):
            assert_right(oracle, ids, pooling, found[request.id])
            assert scores[request.id] == pytest.approx(scores_of(oracle, ids), abs=1e-4)
    driver.run()
    assert driver.tokens[200] == driver.tokens[100]
    assert driver.engine.num_rows_taken == 0 and not driver.engine._table.prompt_outputs


def test_scores_are_the_models_own(tiny_model_path: Path) -> None:
    """Regardless of the sampling parameters."""
    driver = Driver(load_engine(tiny_model_path))
    changed = {"logit_bias": ((5, 50.0),), "repetition_penalty": 3.0, "temperature": 0.1}
    requests = [
        driver.request(0, PROMPTS[3], **WANTED),
        driver.request(1, PROMPTS[3], sampling=changed, **WANTED),
    ]
    output = driver.add(requests)
    assert driver.tokens[1] == [5]
    scores = scored(output)
    assert scores[1] == scores[0] and not output.pooled_prompts


def test_cached_tokens_do_for_the_last_one(tiny_model_path: Path) -> None:
    driver = Driver(load_engine(tiny_model_path))
    size = driver.engine.block_size
    ids = [3 + n % 90 for n in range(3 * size)]
    first = driver.request(0, ids, max_new_tokens=9, pooling=pb.POOLING_LAST, ignore_eos_token=True)
    second = driver.request(1, ids, pooling=pb.POOLING_LAST, **WANTED)
    tables = [*driver.tables[0][:2], *driver.tables[1][2:]]
    second = changed(second, block_table=tables, num_cached_tokens=2 * size)
    found = vectors(driver.add([first]))
    behind = vectors(driver.engine.step(*step_of(driver.engine, [second])))
    assert behind[1] == pytest.approx(found[0], abs=1e-4)
    with pytest.raises(BatchError, match="32 are cached"):
        driver.engine.step(
            *step_of(driver.engine, [changed(second, id=2, pooling=pb.POOLING_MEAN)])
        )


class _Norm:
    """See `Model`; only the norm is used."""

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden * 2


def test_the_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on `meta` have no values: reading one fails."""
    fetched: list[tuple[int, ...]] = []

    def fetch(found: Tensor) -> Tensor:
        assert found.is_meta
        fetched.append(tuple(found.shape))
        return torch.zeros(found.shape)

    monkeypatch.setattr(steps, "_fetched", fetch)
    table = RowTable(4, 600, 16, 400)
    wanted: Any = {"max_new_tokens": 1, "score_token_ids": (5, 7)}
    for number, pooling in enumerate((pb.POOLING_MEAN, pb.POOLING_LAST)):
        blocks = range(40 * number, 40 * number + 33)
        table.take(new_request(number, range(520), blocks, pooling=pooling, **wanted))
    rows, counts = np.array([0, 1]), np.array([520, 520])
    scheduled = steps.ScheduledTokens(rows, 0 * counts, counts, np.array([1, 1]), counts)
    hidden = torch.empty(1040, 64, dtype=torch.bfloat16, device="meta")
    logits = torch.empty(2, 300, device="meta")
    own: Any = _Norm()
    parts = list(steps.read_pass(table, own, scheduled, hidden, logits))
    assert [part.row for part in parts] == [0, 1]
    assert fetched == [(64,), (2,), (64,), (2,)]
