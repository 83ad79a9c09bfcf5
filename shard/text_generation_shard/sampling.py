"""From scores to tokens, for all choices of a step at once.

The order is TGI's (fact sheet model-server.md §7): what a grammar does not allow (`grammar`), then
watermark, repetition penalty, frequency and presence penalty, logit bias, forbidden end tokens,
temperature, top_k, top_p, typical_p, choice. Frequency and presence penalties are OpenAI's: they
look at the output only. Reported log-probabilities are the log-softmax of the scores after all of
that, so with a grammar they are those among the tokens it allows.

A draw is a function of (seed, position) and the row's own scores, never of the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.columns import SamplingColumns, Watermark
from text_generation_shard.truncation import keep_likely

# The prime TGI seeds green lists with (utils/watermark.py).
_WATERMARK_PRIME = 15485863
# Neighbouring tokens whose weights are added up before a draw.
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """What came before each of the S choices of a step; may live on the host."""

    # [*, width] token ids of rows, anything beyond what is known.
    token_ids: Tensor
    # [S] the row of each choice in token_ids.
    rows: Tensor
    # [S] tokens known, and how many of them are the prompt. The token to choose sits at `lens`.
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


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    history: TokenHistory,
    forbidden: Tensor | None,
    watermark: Watermark,
) -> Choice:
    """Choose one token a row from logits [R, vocab] float32, which this may overwrite.

    `forbidden` [n, 2] lists (row, token id) pairs that can not be chosen now. Rows and history are
    in the order of `columns`; history may live on the host.
    """
    for row in columns.watermarked_rows:
        previous = history.token_ids[history.rows[row], history.lens[row] - 1]
        _favour_green(logits[row], watermark, int(previous))
    if len(columns.penalised_rows):
        _penalise(logits, columns, history)
    if len(columns.bias_rows):
        logits.index_put_(
            (columns.bias_rows, columns.bias_ids), columns.bias_values, accumulate=True
        )
    if forbidden is not None:
        logits[forbidden[:, 0], forbidden[:, 1]] = float("-inf")
    token_ids = best = _best(logits)
    if len(columns.sampling_rows):
        scores = _relative_scores(logits, best, columns)
        if columns.is_filtering:
            scores = keep_likely(scores, columns)
        _put_rows(logits, columns.sampling_rows, scores)
        token_ids = best.clone()
        if columns.is_typical:
            # The best token may be too likely to be typical.
            best = _best(logits)
        positions = history.lens[columns.sampling_rows.to(history.lens.device)]
        token_ids[columns.sampling_rows] = _draw(scores, uniform(columns.seeds, positions))
    chosen, highest = logits.gather(1, torch.stack((token_ids, best), dim=1)).unbind(1)
    return Choice(token_ids, chosen - highest - _log_mass(logits, highest), logits)


# On the processor what follows goes through numpy: its loops over a row use the widest vectors (the
# best of 32 rows of 32,768 scores in 0.06 instead of 0.9 ms), and start no threads that others must
# wait for, which takes milliseconds where a neighbour has the other core.


def _relative_scores(logits: Tensor, best: Tensor, columns: SamplingColumns) -> Tensor:
    """The scores of the rows that draw, from the best one down, over their temperature [n, vocab].

    So that the smallest temperatures overflow to -inf, not to NaN.
    """
    rows = columns.sampling_rows
    if logits.device.type != "cpu":
        scores = logits[rows]
        return (scores - scores.amax(dim=-1, keepdim=True)) / columns.temperature
    values = logits.numpy()[rows.numpy()]
    with np.errstate(invalid="ignore", over="ignore"):
        values -= values[np.arange(len(rows)), best.numpy()[rows.numpy()], None]
        values /= columns.temperature.numpy()
    return torch.from_numpy(values)


def _put_rows(logits: Tensor, rows: Tensor, scores: Tensor) -> None:
    """Write scores [n, vocab] over these rows."""
    if logits.device.type != "cpu":
        logits[rows] = scores
    else:
        logits.numpy()[rows.numpy()] = scores.numpy()


def _best(logits: Tensor) -> Tensor:
    """The first of the best tokens of each row [R]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=1))


def _log_mass(scores: Tensor, highest: Tensor) -> Tensor:
    """log of the sum of e ** (score - highest) of each row [R]."""
    if scores.device.type != "cpu":
        return torch.logsumexp(scores - highest[:, None], dim=-1)
    # A row without any finite score has no such number.
    with np.errstate(invalid="ignore"):
        shifted = scores.numpy() - highest.numpy()[:, None]
    np.exp(shifted, out=shifted)
    return torch.from_numpy(np.log(shifted.sum(axis=1)))


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
    """Where `numbers` [R] fall in the cumulative distribution of each row of scores [R, vocab];
    none of them is above 0."""
    if scores.device.type == "cpu":
        return torch.from_numpy(_drawn(np.exp(scores.numpy()), numbers.numpy()))
    cumulative = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = numbers.to(scores.device)[:, None] * total
    # Below the total even after rounding, so that a token of probability 0 is never hit.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return drawn.clamp_(max=scores.shape[1] - 1)


def _drawn(weights: Any, numbers: Any) -> Any:
    """The same for weights [R, vocab], by way of blocks of them: first which block, then where in
    it, so that only the sums of blocks are accumulated."""
    rows, vocab = np.arange(len(weights)), weights.shape[1]
    sums = np.add.reduceat(weights, np.arange(0, vocab, _BLOCK), axis=1).astype(np.float64)
    cumulative = sums.cumsum(axis=1)
    targets = numbers * cumulative[:, -1]
    block = _first_beyond(cumulative, sums, targets)
    targets = targets - (cumulative - sums)[rows, block]
    places = block[:, None] * _BLOCK + np.arange(_BLOCK)
    inside = np.where(places < vocab, weights[rows[:, None], np.minimum(places, vocab - 1)], 0.0)
    inside = inside.astype(np.float64)
    return block * _BLOCK + _first_beyond(inside.cumsum(axis=1), inside, targets)


def _first_beyond(cumulative: Any, weights: Any, targets: Any) -> Any:
    """The first place of each row whose cumulative weight exceeds the target, or the last one that
    has a weight, should rounding have put the target behind it."""
    found = (cumulative > targets[:, None]) & (weights > 0)
    last = weights.shape[1] - 1 - (weights > 0)[:, ::-1].argmax(axis=1)
    return np.where(found.any(axis=1), found.argmax(axis=1), last)


def _penalise(logits: Tensor, columns: SamplingColumns, history: TokenHistory) -> None:
    rows = columns.penalised_rows
    if logits.device.type == "cpu":
        _penalise_tokens(logits.numpy(), columns, history)
        return
    lens, prompt_lens = history.lens[rows][:, None], history.prompt_lens[rows][:, None]
    width = int(lens.max())
    device = logits.device
    token_ids = history.token_ids[history.rows[rows], :width].to(device, torch.int64)
    places = torch.arange(width)[None]
    is_known = (places < lens).to(device, torch.float32)
    is_output = ((places < lens) & (places >= prompt_lens)).to(device, torch.float32)
    rows = rows.to(device)
    scores = logits[rows]
    occurs = torch.zeros_like(scores).scatter_add_(1, token_ids, is_known) > 0
    counts = torch.zeros_like(scores).scatter_add_(1, token_ids, is_output)
    repeated = torch.where(scores > 0, scores / columns.repetition, scores * columns.repetition)
    scores = torch.where(occurs, repeated, scores)
    scores -= columns.frequency * counts + columns.presence * (counts > 0)
    logits[rows] = scores


def _penalise_tokens(logits: Any, columns: SamplingColumns, history: TokenHistory) -> None:
    """The same in place, touching no score but those of tokens that occurred."""
    rows = columns.penalised_rows.numpy()
    lens, prompt_lens = history.lens.numpy()[rows], history.prompt_lens.numpy()[rows]
    token_ids = history.token_ids.numpy()[history.rows.numpy()[rows], : lens.max()]
    places = np.arange(token_ids.shape[1])
    vocab, flat_ids = logits.shape[1], token_ids + np.arange(len(rows))[:, None] * logits.shape[1]
    occurring = np.unique(flat_ids[places < lens[:, None]])
    owner, token = occurring // vocab, occurring % vocab
    scores, repetition = logits[rows[owner], token], columns.repetition.numpy()[owner, 0]
    logits[rows[owner], token] = np.where(scores > 0, scores / repetition, scores * repetition)
    is_output = (places < lens[:, None]) & (places >= prompt_lens[:, None])
    occurring, counts = np.unique(flat_ids[is_output], return_counts=True)
    owner, token = occurring // vocab, occurring % vocab
    frequency, presence = columns.frequency.numpy()[owner, 0], columns.presence.numpy()[owner, 0]
    logits[rows[owner], token] -= frequency * counts.astype(np.float32) + presence


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
