"""A step that ran out of memory is computed in parts, and only rows that do not fit alone fail.

This module decides how to cut a step; the engine computes.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from text_generation_proto import pb

from text_generation_shard.arrays import Ints
from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.engine.row_table import RowTable

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
