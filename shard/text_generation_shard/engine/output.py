"""From the sampled tokens of a step to its output: verifies draft tokens, writes the accepted
tokens."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from text_generation_proto import pb

from text_generation_shard.arrays import NO_INTS, Ints
from text_generation_shard.engine.planner import Plan, SampledPositions
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.grammars.masks import StepGrammars
from text_generation_shard.parallel import World
from text_generation_shard.sampling import Choice, top_tokens

logger = logging.getLogger(__name__)

# Sent to the client.
_NO_SCORES = "the model's scores for the next token are not numbers (NaN or infinite)"

_LOST = "the step in which the grammar went on has failed on another shard"

# Marks. At a row's first position: its grammar replaced the token, or can not go on. At any
# position: the scores are not finite.
_DRIVEN, _FAILED, _UNSOUND = 1, 2, 3


class Computed(NamedTuple):
    """A computed step, or a part of one, not yet written into the row table."""

    plan: Plan
    # time.perf_counter_ns() at the end of its passes.
    done_ns: int
    output: pb.StepResponse
    # The accepted tokens: [T] each.
    rows: Ints = NO_INTS
    positions: Ints = NO_INTS
    token_ids: Ints = NO_INTS
    # [R] accepted tokens of each row that sampled.
    counts: Sequence[int] = ()
    # Rows whose request has ended, and those whose grammar has replaced a token.
    ended: Sequence[int] = ()
    driven: Sequence[int] = ()


def verify(
    plan: Plan,
    choice: Choice,
    done_ns: int,
    table: RowTable,
    end_ids: frozenset[int],
    world: World,
) -> Computed:
    """Compare the chosen tokens with the draft tokens in the table, and find the requests that
    ended. All ranks choose the same tokens, except for rows with a grammar: rank 0 broadcasts
    those."""
    samples, grammars = plan.samples, plan.grammars
    unsound = choice.unsound()
    if grammars is not None:
        choice = grammars.settle(choice)
    token_ids, marks = choice.token_ids, NO_INTS
    if unsound or grammars is not None:
        marks = _marks(len(token_ids), unsound, grammars)
    if world.size > 1 and table.are_constrained(samples.owners):
        if not len(marks):
            marks = np.zeros_like(token_ids)
        token_ids, marks = _broadcast(token_ids, marks, grammars, world)
    counts, reasons = _judge(table, samples, token_ids.tolist(), end_ids)
    errors: list[pb.RequestError] = []
    if marks.any():
        sentences = {} if grammars is None else grammars.failures()
        errors = _failures(plan, marks, counts, reasons, sentences)
    driven = samples.owners[marks[samples.firsts] == _DRIVEN].tolist() if len(marks) else []
    found = pb.Generations(request_ids=plan.request_ids, finish_reasons=reasons)
    choice = choice._replace(token_ids=token_ids)
    ended = [row for row, why in zip(samples.owners.tolist(), reasons, strict=True) if why]
    rows, positions, token_ids = _accepted(table, samples, choice, counts, found)
    output = pb.StepResponse(generations=found, errors=errors)
    return Computed(plan, done_ns, output, rows, positions, token_ids, counts, ended, driven)


def write(computed: Computed, table: RowTable) -> pb.StepResponse:
    """Write results into the row table, and release the rows that ended."""
    plan, output, samples = computed.plan, computed.output, computed.plan.samples
    for part in plan.prompt_parts:
        table.prompt_outputs[part.row].add(part)
    if not computed.counts:
        return output
    table.token_ids[computed.rows, computed.positions] = computed.token_ids
    if not samples.is_single:
        right = np.array(computed.counts) - 1
        table.lens[samples.owners] = samples.positions[samples.firsts] + right
    if table.prompt_outputs:
        for row in samples.owners.tolist():
            if (found := table.prompt_outputs.pop(row, None)) is not None:
                found.write(output)
    table.driven.update(computed.driven)
    if computed.ended:
        table.release(computed.ended)
    return output


def _broadcast(
    token_ids: Ints, marks: Ints, grammars: StepGrammars | None, world: World
) -> tuple[Ints, Ints]:
    """The tokens and marks of rank 0."""
    try:
        token_ids, marks = world.broadcast(np.stack((token_ids, marks)))
    except BaseException:
        if grammars is not None:
            # The step is undone, but the grammars have consumed its tokens.
            grammars.abandon(_LOST)
        raise
    return token_ids, marks


def _marks(count: int, unsound: frozenset[int], grammars: StepGrammars | None) -> Ints:
    """The mark of each position [S]; 0: none."""
    marks = np.zeros(count, dtype=np.int64)
    if grammars is not None:
        marks[grammars.driven()] = _DRIVEN
        marks[list(grammars.failures())] = _FAILED
    marks[list(unsound)] = _UNSOUND
    return marks


def _failures(
    plan: Plan,
    marks: Ints,
    counts: list[int],
    reasons: list[pb.FinishReason],
    sentences: dict[int, str],
) -> list[pb.RequestError]:
    """The errors of the rows [R] that failed; updates `reasons`."""
    errors: list[pb.RequestError] = []
    for index, (first, count) in enumerate(zip(plan.samples.firsts.tolist(), counts, strict=True)):
        # Positions behind a wrong draft token are ignored.
        if (marks[first : first + count] == _UNSOUND).any():
            sentence = _NO_SCORES
        elif marks[first] == _FAILED:
            sentence = sentences.get(first, "")
        else:
            if marks[first] == _DRIVEN and reasons[index] == pb.FINISH_REASON_EOS_TOKEN:
                # The grammar ended the text because of max_new_tokens.
                reasons[index] = pb.FINISH_REASON_LENGTH
            continue
        errors.append(pb.RequestError(request_id=plan.request_ids[index], message=sentence))
        reasons[index] = pb.FINISH_REASON_ERROR
    if failed := sum(error.message == _NO_SCORES for error in errors):
        logger.warning(
            "%d of %d requests failed in this step: %s; the checkpoint is damaged, or its values "
            "are too large for this type: try --dtype float32, or download the model again",
            failed,
            len(counts),
            _NO_SCORES,
        )
    return errors


def _judge(
    table: RowTable,
    samples: SampledPositions,
    token_ids: Sequence[int],
    end_ids: frozenset[int],
) -> tuple[list[int], list[pb.FinishReason]]:
    """For each row [R], the number of accepted tokens, up to the first that differs from its draft
    token or ends the text, and the FinishReason of the last one.

    A loop over rows: with the few rows of a step it is faster than array operations.
    """
    owners, positions = samples.owners, samples.positions.tolist()
    draft_tokens: Sequence[int] = ()
    if not samples.is_single:
        draft_tokens = table.token_ids[samples.rows, samples.positions].tolist()
    counts, reasons, stops = list[int](), list[pb.FinishReason](), table.sampling.stop_token_ids
    length, end_token = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_EOS_TOKEN
    stop_token, goes_on = pb.FINISH_REASON_STOP_TOKEN, pb.FINISH_REASON_NONE
    for row, first, end, longest, ignores_end in zip(
        owners.tolist(),
        samples.firsts.tolist(),
        samples.ends.tolist(),
        table.longest[owners].tolist(),
        table.ignore_eos[owners].tolist(),
        strict=True,
    ):
        for at in range(first, end):
            is_end = token_ids[at] in end_ids and not ignores_end
            is_stop = row in stops and table.stops(row, token_ids[at], positions[at])
            if is_end or is_stop or at == end - 1 or token_ids[at] != draft_tokens[at]:
                break
        counts.append(at + 1 - first)
        is_last = positions[at] + 1 >= longest
        otherwise = stop_token if is_stop else length if is_last else goes_on
        reasons.append(end_token if is_end else otherwise)
    return counts, reasons


def _accepted(
    table: RowTable,
    samples: SampledPositions,
    choice: Choice,
    counts: list[int],
    output: pb.Generations,
) -> tuple[Ints, Ints, Ints]:
    """Take the accepted tokens from all positions [S], and write them into the output; their rows,
    positions and ids."""
    rows, positions = samples.rows, samples.positions
    token_ids, logprobs = choice.token_ids, choice.logprobs
    index: Sequence[int] = range(len(rows))
    if not samples.is_single:
        pairs = zip(samples.firsts.tolist(), counts, strict=True)
        index = [at for first, count in pairs for at in range(first, first + count)]
        rows, positions = rows[index], positions[index]
        token_ids, logprobs = token_ids[index], logprobs[index]
        if len(index) > len(counts):
            output.token_counts.extend(counts)
    output.token_ids.extend(token_ids.tolist())
    output.logprobs.extend(logprobs.tolist())
    if table.top_n_tokens:
        _add_top_tokens(output, table, rows.tolist(), index, choice)
    return rows, positions, token_ids


def _add_top_tokens(
    output: pb.Generations,
    table: RowTable,
    rows: Sequence[int],
    index: Sequence[int],
    choice: Choice,
) -> None:
    if not any(row in table.top_n_tokens for row in rows):
        return
    for row, at in zip(rows, index, strict=True):
        count = table.top_n_tokens.get(row, 0)
        ids, logprobs = top_tokens(choice, at, count) if count else ([], [])
        output.top_token_counts.append(len(ids))
        output.top_token_ids.extend(ids)
        output.top_token_logprobs.extend(logprobs)
