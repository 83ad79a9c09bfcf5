"""Sampling: each parameter against a plain definition of it, and the distribution of draws."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_process.sampling import Sampling
from text_generation_shard import sampling
from text_generation_shard.device.cpu import runner as compiled_sampling
from text_generation_shard.sampling import (
    Choice,
    Sampler,
    SamplingTable,
    TokenHistory,
    Watermark,
    top_tokens,
    uniform,
)

VOCAB = 50
CLOSE = {"abs": 1e-4, "rel": 1e-4}


def make_history(rows: int, tokens: Sequence[int] = (1,), prompt_len: int = 1) -> TokenHistory:
    return history_of([list(tokens)] * rows, [len(tokens)] * rows, [prompt_len] * rows)


def history_of(
    token_ids: Sequence[Sequence[int]],
    lens: Sequence[int],
    prompt_lens: Sequence[int],
    min_new_tokens: Sequence[int] | None = None,
) -> TokenHistory:
    return TokenHistory(
        np.array(token_ids, dtype=np.int32),
        np.arange(len(lens)),
        np.array(lens),
        np.array(prompt_lens),
        np.array(min_new_tokens or [0] * len(lens)),
    )


def choose(
    logits: torch.Tensor,
    params: Sequence[Sampling],
    history: TokenHistory | None = None,
    end_ids: Sequence[int] = (),
    sample: Sampler = compiled_sampling.sample,
) -> Choice:
    table = SamplingTable(len(params))
    for row, item in enumerate(params):
        table.set(row, item)
    history = history or make_history(len(params))
    ends = np.array(end_ids, dtype=np.int64)
    return sample(logits.clone(), table, history, ends, Watermark(0.5, 2.0))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_takes_the_best_and_reports_its_log_softmax(logits: torch.Tensor) -> None:
    choice = choose(logits, [Sampling()] * 4)
    assert choice.token_ids.tolist() == logits.argmax(-1).tolist()
    wanted = logits.log_softmax(-1).max(-1).values
    assert choice.logprobs == pytest.approx(wanted.numpy(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5])
def test_the_smallest_temperatures_are_greedy(logits: torch.Tensor, temperature: float) -> None:
    choice = choose(logits, [Sampling(temperature=temperature, top_p=0.9, seed=3)] * 4)
    assert choice.token_ids.tolist() == logits.argmax(-1).tolist()
    assert choice.logprobs.tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def allowed(choice: Choice, row: int = 0) -> set[int]:
    return set((choice.scores[row] > float("-inf")).nonzero()[:, 0].tolist())


def best(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.topk(min(k, VOCAB)).indices


def smallest_set(logits: torch.Tensor, p: float) -> torch.Tensor:
    """The fewest tokens that reach p."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    return order[: next(n for n in range(1, VOCAB + 1) if probabilities[:n].sum() >= p)]


def likely(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Those that are likely beside the best."""
    probabilities = logits.double().softmax(-1)
    return (probabilities >= probabilities.max() * p).nonzero()[:, 0]


def typical(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Those that surprise as much as expected."""
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    order = (-logprobs - entropy).abs().argsort()
    return order[: int((logprobs.exp()[order].cumsum(0) < p).sum()) + 1]


@pytest.mark.parametrize("temperature", [1.0, 1.9])
@pytest.mark.parametrize(
    ("name", "kept", "values"),
    [
        ("top_k", best, (1, 2, 7, VOCAB, 10 * VOCAB)),
        ("top_p", smallest_set, (1e-6, 0.1, 0.5, 0.9, 0.999)),
        ("min_p", likely, (1e-30, 1e-6, 0.02, 0.3, 1.0)),
        ("typical_p", typical, (0.1, 0.5, 0.9)),
    ],
)
def test_a_filter_keeps_what_its_definition_says(
    logits: torch.Tensor, name: str, kept: Any, values: Sequence[Any], temperature: float
) -> None:
    for value in values:
        choice = choose(logits, [Sampling(temperature=temperature, **{name: value})] * 4)
        assert allowed(choice) == set(kept(logits[0] / temperature, value).tolist())


def test_top_k_keeps_ties() -> None:
    choice = choose(torch.tensor([[3.0, 1.0, 3.0, 3.0, 0.0]]), [Sampling(top_k=2)])
    assert allowed(choice) == {0, 2, 3}


def test_top_p_takes_equals_in_order() -> None:
    choice = choose(torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0]]), [Sampling(top_p=0.4)])
    assert allowed(choice) == {1, 2}


def test_top_p_counts_what_min_p_has_left() -> None:
    """As in vLLM: of 0.5, 0.3, 0.1 and 0.1 two are left, of which the first has 0.625."""
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    choice = choose(scores, [Sampling(min_p=0.5, top_p=0.6)])
    assert allowed(choice) == {0}
    assert allowed(choose(scores, [Sampling(top_p=0.6)])) == {0, 1}


@pytest.mark.parametrize("sample", [compiled_sampling.sample, sampling.sample])
def test_stop_tokens_are_not_chosen_too_early(sample: Sampler) -> None:
    """Stop tokens of a row affect that row only, and it may have biases, too."""
    table, ends = SamplingTable(3), np.array([9], dtype=np.int64)
    bias = ((3, 50.0), (4, 40.0), (5, 30.0))
    for row, stops in enumerate([(3, 4), (4,), (3, 4)]):
        table.set(row, Sampling(logit_bias=bias), stops)
    history = history_of([[1]] * 3, [1] * 3, [1] * 3, [2, 2, 0])
    scores, watermark = torch.zeros(3, VOCAB), Watermark(0.5, 2.0)
    early = sample(scores.clone(), table, history, ends, watermark)
    assert early.token_ids.tolist() == [5, 3, 3]
    # The same rows, later.
    later = history._replace(lens=history.lens + 2)
    assert sample(scores.clone(), table, later, ends, watermark).token_ids.tolist() == [3, 3, 3]
    table.set(0, Sampling(logit_bias=bias))
    assert sample(scores.clone(), table, history, ends, watermark).token_ids[0] == 3


def test_repetition_penalty_covers_prompt_and_output() -> None:
    scores = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    history = make_history(1, (1, 2), prompt_len=1)
    choice = choose(scores, [Sampling(repetition_penalty=2.0)], history)
    assert choice.scores[0].tolist() == [2.0, 1.0, -4.0, 2.0]


def test_frequency_and_presence_count_the_output_only() -> None:
    history = make_history(1, (0, 1, 1, 2), prompt_len=1)
    params = Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    choice = choose(torch.zeros(1, 4), [params], history)
    assert choice.scores[0].tolist() == [0.0, -1.25, -0.75, 0.0]


def test_logit_bias_shifts_and_bans(logits: torch.Tensor) -> None:
    best = int(logits[1].argmax())
    params = [Sampling(), Sampling(logit_bias=((best, -100.0), (3, 1.5)))]
    choice = choose(logits[:2], params)
    assert choice.token_ids[1] != best
    assert choice.scores[1, 3] == pytest.approx(float(logits[1, 3]) + 1.5)
    torch.testing.assert_close(choice.scores[0], logits[0])


def test_forbidden_tokens_are_never_chosen(logits: torch.Tensor) -> None:
    best = int(logits[2].argmax())
    history = history_of([[1, 2]] * 4, [2] * 4, [1] * 4, [1, 0, 2, 1])
    choice = choose(logits, [Sampling()] * 4, history, end_ids=[best])
    assert choice.token_ids[2] == logits[2].topk(2).indices[1]
    assert choice.scores[0, best] == logits[0, best]


def test_watermark_favours_half_the_vocabulary_by_delta(logits: torch.Tensor) -> None:
    choice = choose(logits, [Sampling(watermark=True)] * 4)
    raised = (choice.scores - logits).round(decimals=4)
    assert set(raised.flatten().tolist()) == {0.0, 2.0}
    assert int((raised[0] > 0).sum()) == VOCAB // 2
    # The green list hangs on the previous token alone.
    assert torch.equal(raised[0], raised[1])


def test_draws_follow_the_distribution() -> None:
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    rows = 20000
    params = [Sampling(do_sample=True, seed=seed) for seed in range(rows)]
    choice = choose(weights.log().repeat(rows, 1), params)
    counts = torch.bincount(torch.from_numpy(choice.token_ids), minlength=5) / rows
    assert counts[4] == 0
    torch.testing.assert_close(counts, weights, atol=0.02, rtol=0)


def test_a_draw_depends_on_seed_and_position_alone(logits: torch.Tensor) -> None:
    params = Sampling(temperature=1.3, top_p=0.95, seed=2**64 - 5)
    alone = choose(logits[:1], [params])
    others: list[Any] = [Sampling(do_sample=True, seed=9), Sampling(), params]
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
    choice = choose(logits, [Sampling(top_k=2), Sampling(temperature=1e8)] * 2)
    assert top_tokens(choice, 0, 5)[0] == logits[0].topk(2).indices.tolist()
    assert len(top_tokens(choice, 1, 5)[0]) == 5


def test_top_tokens_include_ties() -> None:
    choice = choose(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), [Sampling()])
    ids, logprobs = top_tokens(choice, 0, 2)
    assert ids == [1, 2, 3]
    assert logprobs == sorted(logprobs, reverse=True)
    assert math.isclose(logprobs[0], float(choice.logprobs[0]), rel_tol=1e-6)


def random_scores(draw: random.Random, generator: torch.Generator) -> torch.Tensor:
    """Rows flat and steep, with ties, with most tokens forbidden, of any vocabulary."""
    vocab, rows = draw.choice([1, 5, 50, 127, 128, 300, 3000]), 24
    scores = torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1) * 12
    if draw.random() < 0.5:
        scores = scores.round(decimals=1)
    if draw.random() < 0.2:
        scores[:, 7:] = float("-inf")
    return scores


def random_params(draw: random.Random, vocab: int) -> Sampling:
    """Random parameters, each of them often off."""
    token = draw.randrange(vocab)
    return Sampling(
        temperature=draw.choice([1.0, 0.3, 1.7]),
        top_k=draw.choice([0, draw.randint(1, 4), draw.randint(1, 2 * vocab)]),
        top_p=draw.choice([1.0, draw.random()]),
        typical_p=draw.choice([1.0, draw.random()]),
        min_p=draw.choice([0.0, draw.random() ** 4]),
        do_sample=draw.random() < 0.5,
        seed=draw.randrange(2**64),
        repetition_penalty=draw.choice([1.0, 1.3]),
        frequency_penalty=draw.choice([0.0, 0.4]),
        presence_penalty=draw.choice([0.0, -0.4]),
        logit_bias=draw.choice([(), ((token, 3.5), (0, -100.0), (token, 1.0))]),
    )


def random_history(draw: random.Random, rows: int, vocab: int) -> TokenHistory:
    lens = [draw.randint(1, 40) for _ in range(rows)]
    return history_of(
        [[draw.randrange(min(vocab, 9)) for _ in range(40)] for _ in range(rows)],
        lens,
        [draw.randint(1, known) for known in lens],
        [draw.choice([0, 0, 20]) for _ in range(rows)],
    )


def test_the_kernel_chooses_as_the_operators_do() -> None:
    """Thousands of rows of all kinds: the same tokens are kept, and the same are chosen."""
    draw, generator = random.Random(4), torch.Generator().manual_seed(4)
    strayed = total = 0
    for _ in range(200):
        scores = random_scores(draw, generator)
        rows, vocab = scores.shape
        params = [random_params(draw, vocab) for _ in range(rows)]
        rest = params, random_history(draw, rows, vocab), [3] if vocab > 5 else []
        choice, wanted = choose(scores, *rest), choose(scores, *rest, sample=sampling.sample)
        # Where a sum meets top_p or a number but for its last bits, a token may be in or out.
        differs = (choice.scores > float("-inf")) != (wanted.scores > float("-inf"))
        same = ~differs.any(dim=1).numpy() & (choice.token_ids == wanted.token_ids)
        strayed, total = strayed + int((~same).sum()), total + rows
        assert choice.logprobs[same] == pytest.approx(wanted.logprobs[same], **CLOSE)
        torch.testing.assert_close(choice.scores[same], wanted.scores[same], atol=1e-4, rtol=1e-4)
    assert strayed <= total // 500


def test_a_choice_is_the_same_regardless_of_batch_composition() -> None:
    """To the last bit, at any place in memory."""
    draw, generator = random.Random(5), torch.Generator().manual_seed(5)
    scores = torch.randn(9, 1001, generator=generator) * 4
    params = [random_params(draw, 1001) for _ in range(9)]
    history = random_history(draw, 9, 1001)
    together = choose(scores, params, history, [3])
    for row in range(9):
        own = TokenHistory(
            history.token_ids[row : row + 1],
            np.zeros(1, dtype=np.int64),
            history.lens[row : row + 1],
            history.prompt_lens[row : row + 1],
            history.min_new_tokens[row : row + 1],
        )
        alone = choose(scores[row : row + 1], params[row : row + 1], own, [3])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]
        assert torch.equal(alone.scores[0], together.scores[row])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "filtering", [{"top_p": 0.9}, {"top_k": 5}, {"typical_p": 0.5}, {"min_p": 0.5}]
)
def test_scores_that_are_not_numbers_crash_nothing(rows: int, filtering: dict[str, Any]) -> None:
    """Scores after an overflow, and penalties at the limits of float32."""
    infinite = torch.randn(rows, 300)
    infinite[0, 7] = math.inf
    params = [Sampling(do_sample=True, **filtering)] * rows
    assert choose(infinite, params).token_ids[0] == 7
    choose(torch.full((rows, 300), math.nan), params)
    for penalty in (1e-46, 1e-39, 1e-30, 1e38):
        strange = [Sampling(do_sample=True, repetition_penalty=penalty, **filtering)] * rows
        chosen = choose(torch.randn(rows, 300), strange, make_history(rows, [3, 4]))
        assert all(0 <= token < 300 for token in chosen.token_ids.tolist())


@pytest.mark.parametrize("sample", [compiled_sampling.sample, sampling.sample])
def test_rows_that_nothing_can_be_chosen_from_are_known(sample: Sampler) -> None:
    """One NaN or +inf anywhere, or no score above -inf, with any parameters; no other row's choice
    changes."""
    draw, generator = random.Random(6), torch.Generator().manual_seed(6)
    for _ in range(100):
        scores = random_scores(draw, generator)
        rows, vocab = scores.shape
        params = [random_params(draw, vocab) for _ in range(rows)]
        rest = params, random_history(draw, rows, vocab), [3] if vocab > 5 else []
        sound = choose(scores, *rest, sample=sample)
        unsound = {row for row in range(rows) if draw.random() < 0.3}
        for row in unsound - sound.unsound():
            place = draw.randrange(vocab)
            if place in rest[2]:
                place = 0  # an end token that comes too early has no score, whatever it was
            if kind := draw.randrange(3):
                scores[row, place] = (math.nan, math.inf)[kind - 1]
            else:
                scores[row] = -math.inf
        choice = choose(scores, *rest, sample=sample)
        assert choice.unsound() == unsound | sound.unsound()
        assert all(0 <= token < vocab for token in choice.token_ids.tolist())
        others = [row for row in range(rows) if row not in choice.unsound()]
        assert choice.token_ids[others].tolist() == sound.token_ids[others].tolist()
        assert choice.logprobs[others].tolist() == sound.logprobs[others].tolist()


def test_forbidden_scores_may_be_nan() -> None:
    """Masked before, or an end token that comes too early."""
    scores = torch.randn(2, 300)
    scores[:, 3] = math.nan
    history = history_of([[1], [1]], [1, 1], [1, 1], [5, 0])
    params = [Sampling(), Sampling()]
    for sample in (compiled_sampling.sample, sampling.sample):
        assert choose(scores, params, history, [3], sample=sample).unsound() == {1}
