"""Choosing tokens: each parameter alone against a plain definition of it, and draws in bulk."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from text_generation_shard.columns import SamplingParams, SamplingTable, Watermark
from text_generation_shard.sampling import (
    Choice,
    TokenHistory,
    _draw,
    sample,
    top_tokens,
    uniform,
)
from text_generation_shard.truncation import keep_likely, keep_likely_by_sorting

VOCAB = 50
CPU = torch.device("cpu")


def make_history(rows: int, tokens: Sequence[int] = (1,), prompt_len: int = 1) -> TokenHistory:
    ids = torch.tensor([list(tokens)] * rows, dtype=torch.int32)
    return TokenHistory(
        ids,
        torch.arange(rows),
        torch.full((rows,), len(tokens)),
        torch.full((rows,), prompt_len, dtype=torch.int64),
    )


def choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    history: TokenHistory | None = None,
    forbidden: torch.Tensor | None = None,
) -> Choice:
    table = SamplingTable(len(params), CPU)
    for row, item in enumerate(params):
        table.set(row, item)
    history = history or make_history(len(params))
    columns = table.columns(torch.arange(len(params)))
    return sample(logits.clone(), columns, history, forbidden, Watermark(0.5, 2.0))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_takes_the_best_and_reports_its_log_softmax(logits: torch.Tensor) -> None:
    choice = choose(logits, [SamplingParams()] * 4)
    assert torch.equal(choice.token_ids, logits.argmax(-1))
    torch.testing.assert_close(choice.logprobs, logits.log_softmax(-1).max(-1).values)


def test_temperature_divides(logits: torch.Tensor) -> None:
    choice = choose(logits, [SamplingParams(temperature=0.5)] * 4)
    wanted = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(choice.scores.log_softmax(-1), wanted)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5])
def test_the_smallest_temperatures_are_greedy(logits: torch.Tensor, temperature: float) -> None:
    choice = choose(logits, [SamplingParams(temperature=temperature, top_p=0.9, seed=3)] * 4)
    assert torch.equal(choice.token_ids, logits.argmax(-1))
    assert choice.logprobs.tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def allowed(choice: Choice, row: int = 0) -> set[int]:
    return set((choice.scores[row] > float("-inf")).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("k", [1, 2, 7, VOCAB, 10 * VOCAB])
def test_top_k_keeps_the_k_best(logits: torch.Tensor, k: int) -> None:
    choice = choose(logits, [SamplingParams(top_k=k)] * 4)
    assert allowed(choice) == set(logits[0].topk(min(k, VOCAB)).indices.tolist())


def test_top_k_keeps_ties() -> None:
    choice = choose(torch.tensor([[3.0, 1.0, 3.0, 3.0, 0.0]]), [SamplingParams(top_k=2)])
    assert allowed(choice) == {0, 2, 3}


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: torch.Tensor, p: float) -> None:
    choice = choose(logits, [SamplingParams(top_p=p)] * 4)
    probabilities, order = logits[0].softmax(-1).sort(descending=True)
    count = next(n for n in range(1, VOCAB + 1) if probabilities[:n].sum() >= p)
    assert allowed(choice) == set(order[:count].tolist())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_typical_p_keeps_what_surprises_as_expected(logits: torch.Tensor, p: float) -> None:
    choice = choose(logits, [SamplingParams(typical_p=p)] * 4)
    logprobs = logits[0].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    order = (-logprobs - entropy).abs().argsort()
    masses = logprobs.exp()[order].cumsum(0)
    count = int((masses < p).sum()) + 1
    assert allowed(choice) == set(order[:count].tolist())


def test_rows_without_a_filter_keep_everything_beside_one_that_has_all(
    logits: torch.Tensor,
) -> None:
    filtering = SamplingParams(top_k=5, top_p=0.5, typical_p=0.5)
    choice = choose(
        logits, [SamplingParams(do_sample=True), filtering, SamplingParams(), filtering]
    )
    torch.testing.assert_close(choice.scores[0].log_softmax(-1), logits[0].log_softmax(-1))
    torch.testing.assert_close(choice.scores[2], logits[2])
    assert len(allowed(choice, 1)) <= 5


def test_repetition_penalty_covers_prompt_and_output() -> None:
    scores = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    history = make_history(1, (1, 2), prompt_len=1)
    choice = choose(scores, [SamplingParams(repetition_penalty=2.0)], history)
    assert choice.scores[0].tolist() == [2.0, 1.0, -4.0, 2.0]


def test_frequency_and_presence_count_the_output_only() -> None:
    history = make_history(1, (0, 1, 1, 2), prompt_len=1)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    choice = choose(torch.zeros(1, 4), [params], history)
    assert choice.scores[0].tolist() == [0.0, -1.25, -0.75, 0.0]


def test_shorter_rows_are_not_penalised_for_padding() -> None:
    history = TokenHistory(
        torch.tensor([[3, 3, 3], [2, 0, 0]], dtype=torch.int32),
        torch.tensor([0, 1]),
        torch.tensor([3, 1]),
        torch.tensor([0, 0]),
    )
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    choice = choose(torch.ones(2, 4), [params] * 2, history)
    assert choice.scores[1].tolist() == [1.0, 1.0, -0.5, 1.0]


def test_logit_bias_shifts_and_bans(logits: torch.Tensor) -> None:
    best = int(logits[1].argmax())
    params = [SamplingParams(), SamplingParams(logit_bias=((best, -100.0), (3, 1.5)))]
    choice = choose(logits[:2], params)
    assert choice.token_ids[1] != best
    assert choice.scores[1, 3] == pytest.approx(float(logits[1, 3]) + 1.5)
    torch.testing.assert_close(choice.scores[0], logits[0])


def test_forbidden_tokens_are_never_chosen(logits: torch.Tensor) -> None:
    best = int(logits[2].argmax())
    choice = choose(logits, [SamplingParams()] * 4, forbidden=torch.tensor([[2, best]]))
    assert choice.token_ids[2] == logits[2].topk(2).indices[1]


def test_watermark_favours_half_the_vocabulary_by_delta(logits: torch.Tensor) -> None:
    choice = choose(logits, [SamplingParams(watermark=True)] * 4)
    raised = (choice.scores - logits).round(decimals=4)
    assert set(raised.flatten().tolist()) == {0.0, 2.0}
    assert int((raised[0] > 0).sum()) == VOCAB // 2
    # The green list hangs on the previous token alone.
    assert torch.equal(raised[0], raised[1])


def test_draws_follow_the_distribution() -> None:
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    rows = 20000
    params = [SamplingParams(do_sample=True, seed=seed) for seed in range(rows)]
    choice = choose(weights.log().repeat(rows, 1), params)
    counts = torch.bincount(choice.token_ids, minlength=5) / rows
    assert counts[4] == 0
    torch.testing.assert_close(counts, weights, atol=0.02, rtol=0)


def test_a_draw_depends_on_seed_and_position_alone(logits: torch.Tensor) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=2**64 - 5)
    alone = choose(logits[:1], [params])
    others: list[Any] = [SamplingParams(do_sample=True, seed=9), SamplingParams(), params]
    batched = choose(logits[[1, 2, 0]], others)
    assert batched.token_ids[2] == alone.token_ids[0]
    drawn = {
        int(choose(logits[:1], [params], make_history(1, (1,) * n)).token_ids[0])
        for n in range(1, 60)
    }
    assert len(drawn) > 3


def test_uniform_numbers_are_uniform_and_independent() -> None:
    seeds = torch.arange(200).repeat_interleave(200) - 100
    numbers = uniform(seeds, torch.arange(200).repeat(200))
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(numbers.var()) == pytest.approx(1 / 12, abs=0.003)
    grid = numbers.view(200, 200) - 0.5
    neighbours = (grid[:, 1:] * grid[:, :-1]).mean(), (grid[1:] * grid[:-1]).mean()
    assert all(abs(float(value)) < 0.003 for value in neighbours)
    assert len(set(numbers.tolist())) == len(numbers)


def test_top_tokens_are_those_that_could_be_chosen(logits: torch.Tensor) -> None:
    choice = choose(logits, [SamplingParams(top_k=2), SamplingParams(temperature=1e8)] * 2)
    assert top_tokens(choice, 0, 5)[0] == logits[0].topk(2).indices.tolist()
    assert len(top_tokens(choice, 1, 5)[0]) == 5


def test_top_tokens_include_ties() -> None:
    choice = choose(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), [SamplingParams()])
    ids, logprobs = top_tokens(choice, 0, 2)
    assert ids == [1, 2, 3]
    assert logprobs == sorted(logprobs, reverse=True)
    assert math.isclose(logprobs[0], float(choice.logprobs[0]), rel_tol=1e-6)


def test_tokens_stay_as_if_all_had_been_sorted() -> None:
    """Thousands of rows, flat and steep, with ties, with most tokens forbidden."""
    generator = torch.Generator().manual_seed(4)
    for trial in range(200):
        vocab, rows = (50, 300, 3000)[trial % 3], 24
        steepness = torch.rand(rows, 1, generator=generator) * 12
        scores = torch.randn(rows, vocab, generator=generator) * steepness
        if trial % 2:
            scores = scores.round(decimals=1)
        if trial % 5 == 0:
            scores[:, 7:] = float("-inf")
        table = SamplingTable(rows, CPU)
        for row in range(rows):
            pick = torch.rand(4, generator=generator).tolist()
            params = SamplingParams(
                top_k=int(pick[0] * 1.5 * vocab ** pick[3]) if pick[0] < 0.7 else 0,
                top_p=pick[1] if pick[1] < 0.9 else 1.0,
                typical_p=pick[2] * 1.5 if pick[2] < 0.6 else 1.0,
                do_sample=True,
            )
            table.set(row, params)
        columns = table.columns(torch.arange(rows))
        scores -= scores.amax(dim=-1, keepdim=True)
        wanted = keep_likely_by_sorting(scores.double(), columns)
        kept = keep_likely(scores.clone(), columns)
        # Where a sum meets top_p to the last bit, one token may be in or out.
        differs = (kept > float("-inf")) != (wanted > float("-inf"))
        assert int(differs.sum()) <= 1
        assert torch.equal(kept[~differs], wanted.float()[~differs])


def test_a_draw_lands_where_its_number_falls() -> None:
    generator = torch.Generator().manual_seed(5)
    for vocab in (1, 5, 127, 128, 129, 1000):
        scores = torch.randn(64, vocab, generator=generator) * 4
        scores[:, ::3] = float("-inf")
        scores[:, vocab // 2] = 0.0
        scores -= scores.amax(dim=-1, keepdim=True)
        numbers = torch.rand(64, generator=generator, dtype=torch.float64)
        numbers[:2] = torch.tensor([0.0, 1 - 2**-53])
        drawn = _draw(scores, numbers)
        cumulative = scores.double().softmax(-1).cumsum(-1)
        assert bool((scores[torch.arange(64), drawn] > float("-inf")).all())
        at = cumulative.gather(1, drawn[:, None])[:, 0]
        before = at - scores.double().softmax(-1).gather(1, drawn[:, None])[:, 0]
        assert bool((before <= numbers + 1e-6).all() and (at >= numbers - 1e-6).all())
