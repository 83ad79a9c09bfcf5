"""Restricts which tokens can be drawn: min_p, top_k, top_p and typical_p, in this order."""

import torch
from torch import Tensor

from text_generation_shard.sampling.table import SamplingColumns


def keep_likely(scores: Tensor, columns: SamplingColumns) -> Tensor:
    """Scores [n, vocab] with -inf for tokens that can not be drawn. The best score must be 0.

    The reference, which sorts; `kernels.choice` computes the same without sorting.
    """
    nothing = float("-inf")
    vocab = scores.shape[1]
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    _, top_k, top_p, typical_p, log_min_p = torch.split(columns.drawn, 1, dim=1)
    ranked = ranked.masked_fill(ranked < log_min_p, nothing)
    k = torch.where(top_k > 0, top_k.long(), vocab).clamp(max=vocab)
    # Ties with the k-th best stay.
    ranked = ranked.masked_fill(ranked < ranked.gather(1, k - 1), nothing)
    probabilities = torch.softmax(ranked, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The smallest set that reaches top_p; it always contains the best token.
    is_out = before >= torch.where(top_p < 1.0, top_p, 2.0)
    is_out[:, 0] = False
    ranked = ranked.masked_fill(is_out, nothing)
    kept = torch.full_like(scores, nothing).scatter_(1, order, ranked)
    return _keep_typical(kept, typical_p) if columns.is_typical else kept


def _keep_typical(scores: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep tokens whose surprisal is closest to the
    entropy."""
    logprobs = torch.log_softmax(scores, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    deviation, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
    reached = probabilities.gather(1, order).cumsum(dim=-1) < typical_p
    last = reached.sum(dim=-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    is_out = (deviation > deviation.gather(1, last)) & (typical_p < 1.0)
    return scores.masked_fill(torch.zeros_like(is_out).scatter_(1, order, is_out), float("-inf"))
