"""What requests read of their prompts: log-probabilities, pooled hidden states, and scores of given
tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from text_generation_proto import pb
from torch import Tensor

from text_generation_shard.arrays import Doubles
from text_generation_shard.device.base import Rows, ScheduledTokens
from text_generation_shard.models.registry import LanguageModel

# Rows of prompt logits computed at once, which bounds their memory.
LOGPROB_ROWS = 256
# Hidden states summed at once, which bounds the memory.
_SUM_ROWS = 256


class PromptPart(NamedTuple):
    """What one pass has found in the prompt of a row. Its tensors are valid after the pass has
    ended."""

    row: int
    # Of the input tokens that follow those of the pass, if requested; and the best tokens there.
    logprobs: pb.PrefillLogprobs
    top_tokens: pb.PrefillTopTokens
    # [hidden_size] float64: the sum of the hidden states, or the last one.
    pooled: Tensor | None
    # [ids] float32 log-probabilities.
    scores: Tensor | None


class PromptOutput:
    """Owns what one request reads of its prompt, as far as computed."""

    def __init__(self, request: pb.Request) -> None:
        self.request = request
        self._logprobs = pb.PrefillLogprobs(request_id=request.id, logprobs=[float("nan")])
        self._top_tokens = pb.PrefillTopTokens(request_id=request.id)
        self._scores: Sequence[float] = ()
        self._total: Doubles | None = None

    def add(self, part: PromptPart) -> None:
        """Add the next pass."""
        self._logprobs.MergeFrom(part.logprobs)
        self._top_tokens.MergeFrom(part.top_tokens)
        if part.pooled is not None:
            found: Doubles = part.pooled.numpy()
            self._total = found.copy() if self._total is None else self._total + found
        if part.scores is not None:
            self._scores = part.scores.tolist()

    def write(self, output: pb.StepResponse) -> None:
        """Write all into the output of the step in which the prompt was complete."""
        request = self.request
        if request.prefill_logprobs:
            output.prefill_logprobs.append(self._logprobs)
        if self._top_tokens.token_ids:
            output.prefill_top_tokens.append(self._top_tokens)
        if self._total is not None:
            divisor = request.num_prompt_tokens if request.pooling == pb.POOLING_MEAN else 1
            values = (self._total / divisor).astype(np.dtype("<f4")).tobytes()
            output.pooled_prompts.add(request_id=request.id, values=values)
        if self._scores:
            output.token_scores.add(request_id=request.id, logprobs=self._scores)


def read_pass(
    table: Rows,
    outputs: Mapping[int, PromptOutput],
    model: LanguageModel,
    scheduled: ScheduledTokens,
    hidden: Tensor,
    logits: Tensor,
) -> Iterator[PromptPart]:
    """What a pass has found in the inputs of rows that have a PromptOutput.

    hidden [T, hidden_size]: of all tokens; logits [S, vocab_size]: of the sampling positions.
    """
    first = num_sampled = 0
    columns = scheduled.rows, scheduled.counts, scheduled.ends, scheduled.num_sampled
    for row, count, end, sampled in zip(*(column.tolist() for column in columns), strict=True):
        wanted, known = outputs.get(row), int(table.input_lens[row])
        # `end` exceeds the input if this step runs behind the one that completes it.
        if wanted is not None and end <= known:
            request, is_complete = wanted.request, end == known
            part = hidden[first : first + count]
            logprobs, top_tokens = pb.PrefillLogprobs(), pb.PrefillTopTokens()
            if request.prefill_logprobs:
                targets = torch.from_numpy(table.token_ids[row, end - count + 1 : end + 1])
                targets = targets[: known - 1 - (end - count)]
                for at in range(0, len(targets), LOGPROB_ROWS):
                    some = targets[at : at + LOGPROB_ROWS]
                    scores = torch.log_softmax(model.logits(part[at : at + len(some)]), dim=-1)
                    _add_logprobs(scores, some, request.top_n_tokens, logprobs, top_tokens)
            pooled = picked = None
            if request.pooling == pb.POOLING_MEAN:
                pooled = _fetched(_total(model, part))
            elif request.pooling == pb.POOLING_LAST and is_complete:
                pooled = _fetched(_total(model, part[-1:]))
            if request.score_token_ids and is_complete and sampled:
                picked = _fetched(_logprobs(logits[num_sampled], request.score_token_ids))
            yield PromptPart(row, logprobs, top_tokens, pooled, picked)
        first += count
        num_sampled += sampled


def _add_logprobs(
    scores: Tensor,
    targets: Tensor,
    num_top: int,
    logprobs: pb.PrefillLogprobs,
    top_tokens: pb.PrefillTopTokens,
) -> None:
    """Add the log-probabilities of `targets` [N] among log-softmax scores [N, vocab_size], and the
    `num_top` best tokens of each."""
    own = scores.gather(1, targets.to(scores.device, torch.int64)[:, None])
    logprobs.logprobs.extend(own[:, 0].tolist())
    logprobs.ranks.extend((1 + (scores > own).sum(dim=1)).tolist())
    if num_top:
        best = scores.topk(min(num_top, scores.shape[1]))
        top_tokens.token_ids.extend(best.indices.flatten().tolist())
        top_tokens.logprobs.extend(best.values.flatten().tolist())


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
