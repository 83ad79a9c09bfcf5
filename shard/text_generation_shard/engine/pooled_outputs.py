"""What requests read of their prompts: pooled hidden states, and scores of given tokens."""

from collections.abc import Iterator, Sequence

import torch
from text_generation_proto import pb
from torch import Tensor

from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.step import PooledPart
from text_generation_shard.models.base import LanguageModel

# Hidden states summed at once, which bounds the memory.
_SUM_ROWS = 256


def pool_pass(
    table: RowTable,
    model: LanguageModel,
    scheduled: ScheduledTokens,
    hidden: Tensor,
    logits: Tensor,
) -> Iterator[tuple[int, PooledPart]]:
    """(row, part) of the inputs of a pass whose requests have a PooledOutput.

    hidden [T, hidden_size]: of all tokens; logits [S, vocab_size]: of the sampling positions. Does
    not wait for the device.
    """
    first = num_sampled = 0
    columns = scheduled.rows, scheduled.counts, scheduled.ends, scheduled.num_sampled
    for row, count, end, sampled in zip(*(column.tolist() for column in columns), strict=True):
        wanted, known = table.pooled_outputs.get(row), int(table.input_lens[row])
        # `end` exceeds the input if this step runs behind the one that completes it.
        if wanted is not None and end <= known:
            request, is_complete = wanted.request, end == known
            part = hidden[first : first + count]
            pooled = scores = None
            if request.pooling == pb.POOLING_MEAN:
                pooled = _fetched(_total(model, part))
            elif request.pooling == pb.POOLING_LAST and is_complete:
                pooled = _fetched(_total(model, part[-1:]))
            if request.score_token_ids and is_complete and sampled:
                scores = _fetched(_logprobs(logits[num_sampled], request.score_token_ids))
            yield row, PooledPart(pooled, scores)
        first += count
        num_sampled += sampled


def _total(model: LanguageModel, hidden: Tensor) -> Tensor:
    """The sum of hidden states [T, hidden_size] after the last norm, in float64, so that chunked
    prefill hardly changes it."""
    parts = [hidden[at : at + _SUM_ROWS] for at in range(0, len(hidden), _SUM_ROWS)]
    return torch.stack([model.normed(part).sum(0, dtype=torch.float64) for part in parts]).sum(0)


def _logprobs(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """The log-probabilities of some tokens, from logits [vocab_size]. Picked one by one: a list of
    ids would have to be copied to the device."""
    return torch.stack([logits[token_id] for token_id in token_ids]) - logits.logsumexp(0)


def _fetched(found: Tensor) -> Tensor:
    """A copy on the host, valid once the step has ended."""
    if found.device.type == "cpu":
        return found.clone()
    # Into pinned memory: the device does the copy in stream order.
    return found.to("cpu", non_blocking=True)
