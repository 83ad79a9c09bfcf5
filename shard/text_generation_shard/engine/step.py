"""Computes planned steps: calls the device's runner with values, pass by pass.

A step that ran out of memory is computed in parts, and only rows that do not fit alone fail.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from text_generation_proto import pb
from torch import Tensor

from text_generation_shard.arrays import Ints, Upload
from text_generation_shard.device.base import (
    ChoiceInputs,
    Launched,
    Runner,
    ScheduledTokens,
    StepScores,
    last_ones,
)
from text_generation_shard.engine.planner import Plan
from text_generation_shard.engine.row_table import PromptPart, RowTable
from text_generation_shard.errors import OwnError
from text_generation_shard.models.registry import LanguageModel
from text_generation_shard.sampling import Scores, TokenHistory, Watermark

# Rows of prompt logits computed at once, which bounds their memory.
LOGPROB_ROWS = 256
# Hidden states summed at once, which bounds the memory.
_SUM_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepRunner:
    """What all steps of an engine share."""

    runner: Runner
    model: LanguageModel
    table: RowTable
    upload: Upload
    # Tokens that end a text.
    end_ids: Ints
    # Ids that are never chosen; None: all may be.
    unused_ids: Tensor | None
    watermark: Watermark
    # Once set, a step fails before its next pass.
    is_stopping: threading.Event

    def launch(self, plan: Plan) -> "LaunchedStep":
        """Start the passes of a step, and the choice of its tokens if nothing that it depends on is
        unknown. Raises BatchError if the shard is stopping."""
        scores = [self._scores(plan, item) for item in plan.passes]
        is_known = plan.before is None or not self.table.depend_on_tokens(plan.samples.rows)
        return LaunchedStep(self, plan, scores, is_known)

    def _scores(self, plan: Plan, scheduled: ScheduledTokens) -> Scores:
        """Scores [S, vocab_size] of the sampled positions of a pass. Adds what it has found in
        prompts to the plan."""
        if self.is_stopping.is_set():
            raise OwnError("the shard is stopping")
        table = self.table
        if plan.before is not None:
            scheduled = scheduled._replace(waiting=plan.waiting(scheduled))
        if not table.prompt_outputs:
            is_kept = len(plan.passes) > 1 or bool(table.top_n_tokens)
            return self.runner.scores(table, scheduled, is_kept)
        with torch.inference_mode():
            hidden = self.runner.hidden(table, scheduled)
            wanted = last_ones(scheduled.counts.cumsum(), scheduled.num_sampled)
            logits = self.model.logits(hidden[self.upload([wanted])[0]])
            plan.prompt_parts += read_pass(table, self.model, scheduled, hidden, logits)
            return logits

    def choose(self, plan: Plan, scores: Scores) -> Launched:
        """Start the choice. Each position is sampled by itself; draft tokens are verified
        afterwards."""
        table, samples = self.table, plan.samples
        history = TokenHistory(
            token_ids=table.token_ids,
            rows=samples.rows,
            lens=samples.positions,
            prompt_lens=table.prompt_lens,
            min_new_tokens=table.min_new_tokens,
        )
        if self.unused_ids is not None:
            with torch.inference_mode():
                scores[:, self.unused_ids] = -math.inf
        given = ChoiceInputs(table.sampling, history, self.end_ids, self.watermark, plan.grammars)
        return self.runner.choose(scores, given)


class LaunchedStep:
    """See `device.base.Launched`. Its tokens are chosen at the latest before the next launch, or in
    `result`."""

    def __init__(
        self, runner: StepRunner, plan: Plan, scores: Sequence[Scores], is_known: bool
    ) -> None:
        """scores: of each pass. is_known: the tokens that the choice depends on are known."""
        self._runner, self._plan = runner, plan
        # None: the tokens are chosen.
        self._scores: Sequence[Scores] | None = scores
        self._launched: Launched | None = None
        self._error: Exception | None = None
        if is_known:
            self.choose()
        else:
            self._launched = runner.runner.mark()

    def choose(self) -> None:
        """Start the choice, once; `result` raises its error."""
        passes, self._scores = self._scores, None
        if passes is None:
            return
        try:
            scores = passes[0]
            if len(passes) > 1:
                with torch.inference_mode():
                    scores = torch.cat([torch.as_tensor(item) for item in passes])
            runner = self._runner
            is_any = len(scores) > 0
            self._launched = runner.choose(self._plan, scores) if is_any else runner.runner.mark()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """See Launched."""
        if self._launched is not None:
            self._launched.wait()

    def result(self) -> StepScores:
        """See Launched."""
        if self._scores is not None:
            self.choose()
        if self._error is not None:
            raise self._error
        assert self._launched is not None, "it has no error"
        return self._launched.result()


def read_pass(
    table: RowTable,
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
        wanted, known = table.prompt_outputs.get(row), int(table.input_lens[row])
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


OUT_OF_MEMORY = torch.OutOfMemoryError, MemoryError
"""Errors of a step that ran out of memory; the device can go on."""

_T = TypeVar("_T")


def unless_short(compute: Callable[[], _T], is_caught: bool = True) -> _T | None:
    """The result of `compute`; None if it ran out of memory and that `is_caught`. Then none of its
    memory is held."""
    try:
        return compute()
    except OUT_OF_MEMORY as error:
        if not is_caught:
            raise
        # The traceback holds frames, and these hold tensors: the error must not keep their memory.
        error.__traceback__ = None
        return None


def compute_in_parts(
    passes: Sequence[ScheduledTokens],
    table: RowTable,
    compute: Callable[[ScheduledTokens], _T | None],
) -> tuple[list[_T], list[int]]:
    """The results of `compute` for each part of these passes, in order, and the rows that do not
    fit alone. A part for which it returns None is cut."""
    left, done, failed = deque(passes), list[_T](), list[int]()
    while left:
        scheduled = left.popleft()
        if (part := compute(scheduled)) is not None:
            done.append(part)
            continue
        smaller = cut(scheduled)
        left.extendleft(reversed(smaller))
        if not smaller:
            row, start = int(scheduled.rows[0]), int(scheduled.starts[0])
            failed.append(row)
            missing = table.block_tables[row, start // table.block_size : table.num_blocks[row]]
            left = deque(written_by_others(without(left, [row]), missing, table))
    return done, failed


def cut(scheduled: ScheduledTokens) -> list[ScheduledTokens]:
    """Smaller passes that replace one, in order. Several rows are cut between two rows, into halves
    of similar size; the input of a single row is halved; a row with draft tokens loses them. Empty:
    one token of one row can not be cut."""
    if len(scheduled.rows) > 1:
        ends = scheduled.counts.cumsum()
        first = 1 + int(np.abs(2 * ends[:-1] - ends[-1]).argmin())
        return [_rows_of(scheduled, slice(first)), _rows_of(scheduled, slice(first, None))]
    columns = scheduled.rows, scheduled.starts, scheduled.counts, scheduled.num_sampled
    row, start, count, num_sampled = (int(column[0]) for column in columns)
    if count == 1:
        return []
    if num_sampled > 1:
        return [_span(row, start, 1, 1)]
    half = count // 2
    return [_span(row, start, half, 0), _span(row, start + half, count - half, num_sampled)]


def _span(row: int, start: int, count: int, num_sampled: int) -> ScheduledTokens:
    values = [[row], [start], [count], [num_sampled], [start + count]]
    rows, starts, counts, sampled, ends = np.array(values, dtype=np.int64)
    return ScheduledTokens(rows, starts, counts, sampled, ends)


def _rows_of(scheduled: ScheduledTokens, index: slice | Ints) -> ScheduledTokens:
    """Some rows of a pass."""
    rows, starts, counts, num_sampled, ends = (column[index] for column in scheduled[:5])
    return ScheduledTokens(rows, starts, counts, num_sampled, ends, scheduled.is_decode)


def without(
    passes: Collection[ScheduledTokens], rows: Collection[int]
) -> Sequence[ScheduledTokens]:
    """The passes without these rows."""
    if not rows:
        return list(passes)
    kept = [(item, np.flatnonzero(~np.isin(item.rows, list(rows)))) for item in passes]
    return [_rows_of(item, index) for item, index in kept if len(index)]


def written_by_others(
    passes: Sequence[ScheduledTokens], missing: Ints, table: RowTable
) -> Iterator[ScheduledTokens]:
    """The passes after the row that was to write the blocks `missing` has failed: a row that shares
    such a block computes it, and what follows, itself."""
    size, seen = table.block_size, set[int]()
    for item in passes:
        starts = item.starts.copy()
        for index, row in enumerate(item.rows.tolist()):
            held = table.block_tables[row, : -(-int(starts[index]) // size)]
            found = np.flatnonzero(np.isin(held, missing))
            if len(found) and row not in seen:
                starts[index] = found[0] * size
            seen.add(row)
        yield item._replace(starts=starts, counts=item.ends - starts)


def merged(outputs: Sequence[pb.StepResponse]) -> pb.StepResponse:
    """One output from those of a step's parts."""
    whole = pb.StepResponse()
    has_counts = any(item.generations.token_counts for item in outputs)
    has_top_tokens = any(item.generations.top_token_counts for item in outputs)
    for item in outputs:
        found = item.generations
        if has_counts and not found.token_counts:
            found.token_counts.extend([1] * len(found.request_ids))
        if has_top_tokens and not found.top_token_counts:
            found.top_token_counts.extend([0] * len(found.token_ids))
        whole.MergeFrom(item)
    return whole


def failure(request_id: int, num_tokens: int, gets_token: bool, was_alone: bool) -> pb.StepResponse:
    """The output for a request that did not fit, after `num_tokens` computed tokens; was_alone: not
    even alone; gets_token: the step was to sample a token, and a meaningless one takes its
    place."""
    how = "though it was computed alone, behind" if was_alone else "and its state is lost, behind"
    sentence = (
        f"there is not enough memory for this request, {how} {num_tokens} of its tokens; shorten "
        "it, or decrease --max-batch-total-tokens"
    )
    output = pb.StepResponse(errors=[pb.RequestError(request_id=request_id, message=sentence)])
    if gets_token:
        found = output.generations
        found.request_ids.append(request_id)
        found.finish_reasons.append(pb.FINISH_REASON_ERROR)
        found.token_ids.append(0)
        found.logprobs.append(0.0)
    return output
