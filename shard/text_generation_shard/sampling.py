"""From scores to tokens, for all rows of a step at once.

The order is TGI's (fact sheet model-server.md §7): what a grammar does not allow (`grammar`), then
watermark, repetition penalty, frequency and presence penalty, logit bias, forbidden end tokens,
temperature, top_k, top_p, typical_p, choice. Frequency and presence penalties are OpenAI's: they
look at the output only. Reported log-probabilities are the log-softmax of the scores after all of
that, so with a grammar they are those among the tokens it allows.

A draw is a function of (seed, position) and the row's own scores, never of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The prime TGI seeds green lists with (utils/watermark.py).
_WATERMARK_PRIME = 15485863
# Below it float32 arithmetic may take a temperature for 0.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen; see NextTokenChooserParameters. Defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are drawn, or the best one is taken."""
        return self.do_sample or self.temperature != 1.0 or self.is_filtering

    @property
    def is_filtering(self) -> bool:
        """Whether some tokens can not be drawn."""
        return self.top_k != 0 or self.top_p < 1.0 or self.typical_p < 1.0

    @property
    def is_penalising(self) -> bool:
        """Whether tokens that occurred are treated differently."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """What the rows of a step have seen so far."""

    # [R, width] token ids, anything beyond a row's length.
    token_ids: Tensor
    # [R] tokens known, and how many of them are the prompt. The token to choose sits at `lens`.
    lens: Tensor
    prompt_lens: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen tokens [R], their log-probabilities [R], and the scores [R, vocab] behind them."""

    token_ids: Tensor
    logprobs: Tensor
    scores: Tensor

    def force(self, row: int, token_id: int) -> None:
        """Make `token_id` the only choice this row had."""
        self.token_ids[row] = token_id
        self.logprobs[row] = 0.0
        self.scores[row] = float("-inf")
        self.scores[row, token_id] = 0.0


@dataclass(frozen=True, slots=True)
class Watermark:
    """Share of the vocabulary that is green, and what green tokens get."""

    gamma: float
    delta: float


class SamplingColumns:
    """The parameters of R rows as device columns; built when a batch changes, not every step."""

    def __init__(
        self, params: Sequence[SamplingParams], watermark: Watermark, device: torch.device
    ) -> None:
        def column(values: list[float], rows: list[int]) -> Tensor:
            return torch.tensor([values[row] for row in rows], device=device)[:, None]

        def rows_where(flags: list[bool]) -> list[int]:
            return [row for row, flag in enumerate(flags) if flag]

        sampling = rows_where([item.is_sampling for item in params])
        self.sampling_rows = torch.tensor(sampling, dtype=torch.int64, device=device)
        temperatures = [max(item.temperature, _MIN_TEMPERATURE) for item in params]
        self.temperature = column(temperatures, sampling)
        self.top_k = column([item.top_k for item in params], sampling)
        self.top_p = column([item.top_p for item in params], sampling)
        self.typical_p = column([item.typical_p for item in params], sampling)
        # uint64 seeds as the int64 of the same bits.
        seeds = [params[row].seed for row in sampling]
        seeds = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
        self.seeds = torch.tensor(seeds, dtype=torch.int64)
        self.is_filtering = any(params[row].is_filtering for row in sampling)
        self.is_typical = any(params[row].typical_p < 1.0 for row in sampling)
        penalised = rows_where([item.is_penalising for item in params])
        self.penalised_rows = torch.tensor(penalised, dtype=torch.int64)
        self.repetition = column([item.repetition_penalty for item in params], penalised)
        self.frequency = column([item.frequency_penalty for item in params], penalised)
        self.presence = column([item.presence_penalty for item in params], penalised)
        bias = [
            (row, token, value)
            for row, item in enumerate(params)
            for token, value in item.logit_bias
        ]
        self.bias_rows = torch.tensor([row for row, _, _ in bias], dtype=torch.int64, device=device)
        self.bias_ids = torch.tensor([token for _, token, _ in bias], device=device)
        self.bias_values = torch.tensor([value for _, _, value in bias], device=device)
        self.watermark = watermark
        self.watermarked_rows = rows_where([item.watermark for item in params])
        self.device = device


def sample(
    logits: Tensor, columns: SamplingColumns, history: TokenHistory, forbidden: Tensor | None
) -> Choice:
    """Choose one token a row from logits [R, vocab] float32, which this may overwrite.

    `forbidden` [n, 2] lists (row, token id) pairs that can not be chosen now. Rows and history are
    in the order of `columns`; history may live on the host.
    """
    for row in columns.watermarked_rows:
        _favour_green(
            logits[row], columns.watermark, int(history.token_ids[row, history.lens[row] - 1])
        )
    if len(columns.penalised_rows):
        _penalise(logits, columns, history)
    if len(columns.bias_rows):
        logits.index_put_(
            (columns.bias_rows, columns.bias_ids), columns.bias_values, accumulate=True
        )
    if forbidden is not None:
        logits[forbidden[:, 0], forbidden[:, 1]] = float("-inf")
    token_ids = logits.argmax(dim=-1)
    if len(columns.sampling_rows):
        # From the best score down, so that the smallest temperatures overflow to -inf, not to NaN.
        scores = logits[columns.sampling_rows]
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / columns.temperature
        if columns.is_filtering:
            scores = _keep_likely(scores, columns)
        logits[columns.sampling_rows] = scores
        positions = history.lens[columns.sampling_rows.to(history.lens.device)]
        token_ids[columns.sampling_rows] = _draw(scores, uniform(columns.seeds, positions))
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return Choice(token_ids, chosen - torch.logsumexp(logits, dim=-1), logits)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position), float64: splitmix64 (Steele et al. 2014)."""
    state = _mix(seeds.cpu()) + positions.cpu() * -0x61C8864680B583EB
    return ((_mix(state) >> 11) & (2**53 - 1)).double() / 2**53


def _mix(bits: Tensor) -> Tensor:
    # int64 products wrap like uint64 ones; right shifts must drop the copied sign bits.
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """Where `numbers` [R] fall in the cumulative distribution of each row of scores [R, vocab]."""
    cumulative = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = numbers.to(scores.device)[:, None] * total
    # Below the total even after rounding, so that a token of probability 0 is never hit.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return drawn.clamp_(max=scores.shape[1] - 1)


def _penalise(logits: Tensor, columns: SamplingColumns, history: TokenHistory) -> None:
    rows = columns.penalised_rows
    lens, prompt_lens = history.lens[rows][:, None], history.prompt_lens[rows][:, None]
    width = int(lens.max())
    token_ids = history.token_ids[rows, :width].to(columns.device, torch.int64)
    places = torch.arange(width)[None]
    is_known = (places < lens).to(columns.device, torch.float32)
    is_output = ((places < lens) & (places >= prompt_lens)).to(columns.device, torch.float32)
    rows = rows.to(columns.device)
    scores = logits[rows]
    occurs = torch.zeros_like(scores).scatter_add_(1, token_ids, is_known) > 0
    counts = torch.zeros_like(scores).scatter_add_(1, token_ids, is_output)
    repeated = torch.where(scores > 0, scores / columns.repetition, scores * columns.repetition)
    scores = torch.where(occurs, repeated, scores)
    scores -= columns.frequency * counts + columns.presence * (counts > 0)
    logits[rows] = scores


def _keep_likely(scores: Tensor, columns: SamplingColumns) -> Tensor:
    """-inf for what top_k, top_p and typical_p exclude, applied one after another."""
    nothing = float("-inf")
    vocab = scores.shape[1]
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    k = torch.where(columns.top_k > 0, columns.top_k, vocab).clamp(max=vocab)
    # Ties with the k-th best stay.
    ranked = ranked.masked_fill(ranked < ranked.gather(1, k - 1), nothing)
    probabilities = torch.softmax(ranked, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The smallest set that reaches top_p: everything that starts below it, the best always.
    is_out = before >= torch.where(columns.top_p < 1.0, columns.top_p, 2.0)
    is_out[:, 0] = False
    ranked = ranked.masked_fill(is_out, nothing)
    kept = torch.full_like(scores, nothing).scatter_(1, order, ranked)
    return _keep_typical(kept, columns.typical_p) if columns.is_typical else kept


def _keep_typical(scores: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep what surprises as much as expected."""
    logprobs = torch.log_softmax(scores, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    deviation, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
    reached = probabilities.gather(1, order).cumsum(dim=-1) < typical_p
    last = reached.sum(dim=-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    is_out = (deviation > deviation.gather(1, last)) & (typical_p < 1.0)
    return scores.masked_fill(torch.zeros_like(is_out).scatter_(1, order, is_out), float("-inf"))


def _favour_green(scores: Tensor, watermark: Watermark, previous: int) -> None:
    """Kirchenbauer et al. 2023: the previous token seeds which part of the vocabulary is green."""
    generator = torch.Generator().manual_seed(_WATERMARK_PRIME * previous)
    size = int(scores.shape[0] * watermark.gamma)
    green = torch.randperm(scores.shape[0], generator=generator)[:size]
    scores[green.to(scores.device)] += watermark.delta


def top_tokens(choice: Choice, row: int, count: int) -> tuple[list[int], list[float]]:
    """The `count` best tokens of a row and all ties with the last of them, best first.

    Tokens that could not be chosen do not count: there may be fewer.
    """
    scores = choice.scores[row]
    least = scores.topk(min(count, scores.shape[0])).values[-1]
    candidates = ((scores >= least) & (scores > float("-inf"))).nonzero()[:, 0]
    values, order = scores[candidates].sort(descending=True, stable=True)
    return candidates[order].tolist(), (values - scores.logsumexp(dim=-1)).tolist()
