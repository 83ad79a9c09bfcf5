"""The CUDA device's choice of tokens compared to torch's operators."""

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_process.sampling import Sampling
from text_generation_shard.arrays import plain_upload
from text_generation_shard.device.cuda import sampler as own_sampling
from text_generation_shard.device.cuda.sampler import begin
from text_generation_shard.grammars.masks import GrammarMasks, StepGrammars
from text_generation_shard.sampling import Choice, SamplingTable, Scores, TokenHistory, Watermark
from text_generation_shard.sampling import sample as plain

from shard.tests import interpreted
from shard.tests.interpreted import PLACE
from shard.tests.test_sampling import (
    CLOSE,
    choose,
    history_of,
    make_history,
    random_history,
    random_params,
)

pytestmark = [*interpreted.MARKS, pytest.mark.slow]


def own(scores: Scores, *rest: Any) -> Choice:
    """The device's choice from CPU scores."""
    there = torch.as_tensor(scores).to(PLACE)
    found = begin(plain_upload(PLACE), there, *rest, *([None] if len(rest) < 5 else [])).cpu()
    token_ids, logprobs, _ = found.numpy()
    return Choice(token_ids.astype(np.int64), logprobs.astype(np.float32), there.cpu())


def sample(scores: Scores, *rest: Any) -> Choice:
    """The choice by definition."""
    choice = plain(torch.as_tensor(scores).to(PLACE), *rest)
    return choice._replace(scores=torch.as_tensor(choice.scores).cpu())


def random_scores(draw: random.Random, generator: torch.Generator) -> torch.Tensor:
    """Flat and steep rows, with ties, with most tokens forbidden."""
    vocab = draw.choice([1, 5, 50, 129, 300])
    scores = torch.randn(8, vocab, generator=generator) * torch.rand(8, 1) * 12
    if draw.random() < 0.5:
        scores = scores.round(decimals=1)
    if draw.random() < 0.2:
        scores[:, 7:] = float("-inf")
    return scores


def check(found: Choice, wanted: Choice) -> int:
    """The number of rows that differ because a sum equals a limit up to its last bits; all other
    rows must agree."""
    differs = (found.scores > float("-inf")) != (wanted.scores > float("-inf"))
    same = ~differs.any(dim=1).numpy() & (found.token_ids == wanted.token_ids)
    assert found.logprobs[same] == pytest.approx(wanted.logprobs[same], **CLOSE)
    torch.testing.assert_close(found.scores[same], wanted.scores[same], atol=1e-4, rtol=1e-4)
    return int((~same).sum())


@pytest.mark.parametrize("sizes", ["own", "small"])
def test_kernels_choose_as_the_operators_do(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small sizes, every loop has several turns, and candidates often exceed the capacity."""
    if sizes == "small":
        small = {"_PART": 64, "_DRAW_TILE": 64, "_FEW": 32, "_CAPACITY": 20, "_TILE": 32}
        for name, value in small.items():
            monkeypatch.setattr(own_sampling, name, value)
    draw, generator = random.Random(4), torch.Generator().manual_seed(4)
    strayed = 0
    for _ in range(5):
        scores = random_scores(draw, generator)
        rows, vocab = scores.shape
        params = [random_params(draw, vocab) for _ in range(rows)]
        rest = params, random_history(draw, rows, vocab), [3] if vocab > 5 else []
        strayed += check(choose(scores, *rest, sample=own), choose(scores, *rest, sample=sample))
    assert strayed == 0


def test_stop_tokens_are_not_chosen_too_early() -> None:
    table, history = SamplingTable(2), history_of([[1]] * 2, [1] * 2, [1] * 2, [2, 0])
    for row in range(2):
        table.set(row, Sampling(logit_bias=((3, 9.0), (4, 8.0))), [3])
    scores, none = torch.zeros(2, 300), np.empty(0, dtype=np.int64)
    assert own(scores, table, history, none, Watermark(0.5, 2.0)).token_ids.tolist() == [4, 3]


def test_a_row_is_chosen_alike_in_any_company() -> None:
    draw, generator = random.Random(5), torch.Generator().manual_seed(5)
    scores = torch.randn(4, 301, generator=generator) * 4
    params = [random_params(draw, 301) for _ in range(4)]
    history = random_history(draw, 4, 301)
    together = choose(scores, params, history, [3], sample=own)
    for row in range(4):
        own_history = TokenHistory(
            history.token_ids[row : row + 1],
            np.zeros(1, dtype=np.int64),
            *(item[row : row + 1] for item in history[2:]),
        )
        alone = choose(scores[row : row + 1], params[row : row + 1], own_history, [3], own)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]
        assert torch.equal(alone.scores[0], together.scores[row])


# numpy warns of what the device computes silently.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_rows_that_nothing_can_be_chosen_from_are_known(bad: float | None) -> None:
    """None: all scores are -inf."""
    scores = torch.randn(6, 300, generator=torch.Generator().manual_seed(6))
    kinds = [Sampling(), Sampling(top_p=0.9), Sampling(top_k=5)]
    params = [*kinds, Sampling(typical_p=0.5), Sampling(do_sample=True), kinds[0]]
    sound = choose(scores, params, sample=own)
    for row in range(5):
        scores[row, 77 if bad is not None else slice(None)] = float("-inf") if bad is None else bad
    found = choose(scores, params, sample=own)
    assert found.unsound() == set(range(5)) and not sound.unsound()
    assert all(0 <= token < 300 for token in found.token_ids.tolist())
    assert found.token_ids[5] == sound.token_ids[5] and found.logprobs[5] == sound.logprobs[5]


def test_forbidden_scores_may_be_nan() -> None:
    scores = torch.randn(2, 300)
    scores[:, 3] = float("nan")
    history = history_of([[1], [1]], [1, 1], [1, 1], [5, 0])
    found = choose(scores, [Sampling()] * 2, history, [3], sample=own)
    assert found.unsound() == {1}


def test_watermarks_and_grammars() -> None:
    """Both at once; three masks for two rows, one of which has drafted a token."""
    vocab = 70
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int64).int()
    job: Future[torch.Tensor] = Future()
    job.set_result(masks)
    rows: list[Any] = [
        SimpleNamespace(place=0, draft_tokens=[4]),
        SimpleNamespace(place=3, draft_tokens=[]),
    ]
    allowed = StepGrammars(GrammarMasks(vocab, PLACE), rows, job)
    table, history = SamplingTable(4), make_history(4, (1, 2))
    for row in range(4):
        table.set(row, Sampling(watermark=row > 1, do_sample=row == 3))
    scores, none = torch.randn(4, vocab), np.empty(0, dtype=np.int64)
    found, wanted = (
        item(scores.clone(), table, history, none, Watermark(0.5, 2.0), allowed)
        for item in (own, sample)
    )
    assert check(found, wanted) == 0
    assert int((found.scores[0] == float("-inf")).sum()) > 10
