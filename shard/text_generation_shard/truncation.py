"""Which tokens can be drawn: top_k, top_p and typical_p, one after another.

`keep_likely_by_sorting` is the definition, and what runs on a GPU. On the processor sorting a whole
vocabulary takes longer than many models: there the tokens near the best one are counted into bins
by their score, and only the bin in which the limit falls is sorted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.columns import SamplingColumns

# How far below the best key tokens are looked at first; almost always that is enough.
_DEPTH = 8.0
_BINS, _BINS_PER_UNIT = 2048, 64.0
# A bin with more tokens is divided again, so often at most: then its tokens are ties or nearly.
_FEW, _DIVISIONS = 256, 4


def keep_likely(scores: Tensor, columns: SamplingColumns) -> Tensor:
    """-inf in place of the scores [n, vocab] of what can not be drawn. The best score is 0."""
    if scores.device.type != "cpu":
        return keep_likely_by_sorting(scores, columns)
    values = scores.numpy()
    for limit, is_on, keep in (
        (columns.top_k, columns.top_k > 0, _keep_top_k),
        (columns.top_p, columns.top_p < 1.0, _keep_top_p),
        (columns.typical_p, columns.typical_p < 1.0, _keep_typical),
    ):
        rows = is_on[:, 0].nonzero()[:, 0].numpy()
        if len(rows):
            values[rows] = keep(values[rows], limit[:, 0].numpy()[rows])
    return scores


def _keep_top_k(scores: Any, top_k: Any) -> Any:
    top_k = np.minimum(top_k, scores.shape[1])
    limits = _find_limits(scores, None, top_k)
    place = np.clip(top_k - limits.before.astype(np.int64), 1, limits.counts) - 1
    # Ties with the k-th best stay.
    lowest = scores[np.arange(len(scores)), limits.ids[np.arange(len(scores)), place]]
    return np.where(scores >= lowest[:, None], scores, np.float32(-np.inf))


def _keep_top_p(scores: Any, top_p: Any) -> Any:
    weights = np.exp(scores)
    targets = top_p * weights.sum(axis=1, dtype=np.float64)
    limits = _find_limits(scores, weights, targets)
    # The smallest set that reaches top_p: everything that starts below it, the best always.
    is_kept = limits.known & (limits.starts < targets[:, None])
    is_kept[:, 0] |= limits.before == 0.0
    kept = np.full_like(scores, -np.inf)
    kept.ravel()[limits.inside] = scores.ravel()[limits.inside]
    row, place = np.nonzero(is_kept)
    kept[row, limits.ids[row, place]] = scores[row, limits.ids[row, place]]
    return kept


def _keep_typical(scores: Any, typical_p: Any) -> Any:
    """Locally typical sampling (Meister et al. 2022): keep what surprises as much as expected."""
    weights = np.exp(scores.astype(np.float64))
    logprobs = scores - np.log(weights.sum(axis=1, keepdims=True))
    probabilities = np.exp(logprobs)
    with np.errstate(invalid="ignore"):
        entropy = -np.nansum(probabilities * logprobs, axis=1, keepdims=True)
    # What can not be drawn is infinitely far.
    nearness = -np.abs(logprobs + entropy)
    limits = _find_limits(nearness, probabilities, typical_p.astype(np.float64))
    # Those before the one that reaches it, that one, and its ties.
    is_short = limits.known & (limits.starts + limits.weights < typical_p[:, None])
    rows, place = np.arange(len(scores)), np.minimum(is_short.sum(axis=1), limits.counts - 1)
    farthest = nearness[rows, limits.ids[rows, place]]
    return np.where(nearness >= farthest[:, None], scores, np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class _Limits:
    """Where, from the largest key of each of n rows down, the weights add up to a target."""

    # Places, in the keys one row after another, of those that are certainly above.
    inside: Any
    # [n] the weight of those.
    before: Any
    # [n, most] the tokens around it, largest key first, equals in order; and how many [n].
    ids: Any
    counts: Any
    # [n, most] which of them are there, their weights, and the weight of all before each.
    known: Any
    weights: Any
    starts: Any


def _find_limits(keys: Any, weights: Any, targets: Any) -> _Limits:
    """keys [n, vocab], at most 0, those of -inf left out; weights [n, vocab], None: 1 each.

    What is found of a row depends on nothing but that row.
    """
    vocab, flat_keys = keys.shape[1], keys.ravel()
    lowest = -_DEPTH
    while True:
        places = np.flatnonzero(flat_keys >= lowest)
        rows = places // vocab
        masses = None if weights is None else weights.ravel()[places].astype(np.float64)
        totals = np.bincount(rows, masses, minlength=len(keys))
        if lowest < -_DEPTH or bool((totals >= targets).all()):
            break
        lowest = float(np.finfo(np.float32).min)
    values = flat_keys[places]
    inside: list[Any] = []
    before, base, scale = np.zeros(len(keys)), np.zeros(len(keys)), _BINS_PER_UNIT
    for _ in range(_DIVISIONS):
        bins = np.clip((-values - base[rows]) * scale, 0, _BINS - 1).astype(np.int64)
        sums = np.bincount(rows * _BINS + bins, masses, minlength=len(keys) * _BINS)
        sums = sums.reshape(-1, _BINS)
        reached = before[:, None] + sums.cumsum(axis=1)
        # The first bin that reaches the target; the last one with anything, where rounding or a
        # lack of tokens has none reach it.
        filled = _BINS - 1 - (sums > 0)[:, ::-1].argmax(axis=1)
        found = np.minimum((reached < targets[:, None]).sum(axis=1), filled)
        limit = found[rows]
        inside.append(places[bins < limit])
        is_left = np.flatnonzero(bins == limit)
        places, rows, values = places[is_left], rows[is_left], values[is_left]
        masses = None if masses is None else masses[is_left]
        place = np.arange(len(keys)), found
        before, base, scale = reached[place] - sums[place], base + found / scale, scale * _BINS
        if np.bincount(rows, minlength=1).max() <= _FEW:
            break
    return _ranked(keys.shape, rows, places, values, masses, before, np.concatenate(inside))


def _ranked(
    shape: Any, rows: Any, places: Any, values: Any, masses: Any, before: Any, inside: Any
) -> _Limits:
    counts = np.bincount(rows, minlength=shape[0])
    order = np.lexsort((-values, rows))
    within = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    most = max(1, int(counts.max()))
    ids, weights = np.zeros((shape[0], most), dtype=np.int64), np.zeros((shape[0], most))
    ids[rows, within] = places[order] % shape[1]
    weights[rows, within] = 1.0 if masses is None else masses[order]
    return _Limits(
        inside=inside,
        before=before,
        ids=ids,
        counts=np.maximum(counts, 1),
        known=np.arange(most) < counts[:, None],
        weights=weights,
        starts=before[:, None] + weights.cumsum(axis=1) - weights,
    )


def keep_likely_by_sorting(scores: Tensor, columns: SamplingColumns) -> Tensor:
    """The same, for any device: the definition."""
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
    return _keep_typical_by_sorting(kept, columns.typical_p) if columns.is_typical else kept


def _keep_typical_by_sorting(scores: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep what surprises as much as expected."""
    logprobs = torch.log_softmax(scores, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    deviation, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
    reached = probabilities.gather(1, order).cumsum(dim=-1) < typical_p
    last = reached.sum(dim=-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    is_out = (deviation > deviation.gather(1, last)) & (typical_p < 1.0)
    return scores.masked_fill(torch.zeros_like(is_out).scatter_(1, order, is_out), float("-inf"))
