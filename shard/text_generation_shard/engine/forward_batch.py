"""From rows to passes: their scheduled tokens, sampled positions and inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from text_generation_shard.arrays import Ints, Upload
from text_generation_shard.device.base import ScheduledTokens, last_ones
from text_generation_shard.device.forward import ForwardBatch
from text_generation_shard.engine.row_table import RowTable

_NONE: Ints = np.empty(0, dtype=np.int64)


def decode_tokens(rows: Ints, starts: Ints) -> ScheduledTokens:
    """One token of each row; each samples."""
    ones = np.ones(len(rows), dtype=np.int64)
    return ScheduledTokens(rows, starts, ones, ones, starts + 1, is_decode=True)


def verified_tokens(rows: Ints, starts: Ints, num_drafted: Ints) -> ScheduledTokens:
    """One token of each row and its draft tokens; each token samples."""
    counts = num_drafted + 1
    return ScheduledTokens(rows, starts, counts, counts, starts + counts)


def prefill_tokens(
    spans: Mapping[int, tuple[int, int]], budget: int, table: RowTable, samples: bool = True
) -> Iterator[ScheduledTokens]:
    """Cut row → [start, end) into passes of at most `budget` tokens. A row samples at the end of
    its input."""
    piece: list[tuple[int, int, int]] = []
    room = budget
    for row, (start, end) in spans.items():
        while start < end:
            count = min(room, end - start)
            piece.append((row, start, count))
            start += count
            room -= count
            if room == 0:
                yield _scheduled(piece, table, samples)
                piece, room = [], budget
    if piece:
        yield _scheduled(piece, table, samples)


def _scheduled(
    piece: list[tuple[int, int, int]], table: RowTable, samples: bool
) -> ScheduledTokens:
    rows, starts, counts = np.array(piece, dtype=np.int64).T.copy()
    ends: Ints = starts + counts
    is_complete = (ends == table.input_lens[rows]) & samples
    return ScheduledTokens(rows, starts, counts, is_complete.astype(np.int64), ends)


def together(first: ScheduledTokens, second: ScheduledTokens) -> ScheduledTokens:
    """Both passes as one."""
    pairs = zip(_columns(first), _columns(second), strict=True)
    rows, starts, counts, num_sampled, ends = (np.concatenate(pair) for pair in pairs)
    return ScheduledTokens(rows, starts, counts, num_sampled, ends)


def _columns(item: ScheduledTokens) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    return item.rows, item.starts, item.counts, item.num_sampled, item.ends


class SampledPositions(NamedTuple):
    """Where a step samples: S positions, grouped by row."""

    # [S] the row, and the position that the sampled token gets.
    rows: Ints
    positions: Ints
    # [R] rows that sample, and the range [first, end) of each among the S.
    owners: Ints
    firsts: Ints
    ends: Ints
    # Each row samples once.
    is_single: bool


def sampled_positions(passes: Sequence[ScheduledTokens]) -> SampledPositions:
    """The sampled positions of a step with these passes."""
    if len(passes) == 1 and passes[0].is_decode:
        only = passes[0]
        index = np.arange(len(only.rows) + 1)
        return SampledPositions(only.rows, only.ends, only.rows, index[:-1], index[1:], True)
    counts = np.concatenate([item.num_sampled for item in passes])
    is_sampling = counts > 0
    counts = counts[is_sampling]
    owners = np.concatenate([item.rows for item in passes])[is_sampling]
    known = np.concatenate([item.ends for item in passes])[is_sampling]
    ends = counts.cumsum()
    rows, positions = np.repeat(owners, counts), last_ones(known + 1, counts)
    is_single = len(rows) == len(owners)
    return SampledPositions(rows, positions, owners, ends - counts, ends, is_single)


def forward_batch(
    scheduled: ScheduledTokens,
    table: RowTable,
    upload: Upload,
    length_rule: str | None,
    tables: Callable[[Ints, int], Tensor] | None,
) -> ForwardBatch:
    """The inputs of a pass, without states. upload: see Device; length_rule: see RotaryEmbedding;
    tables: see StepPlan.batch."""
    contexts = scheduled.ends.tolist()
    rows, positions = scheduled.tokens()
    if scheduled.is_decode:
        wanted, offsets = _NONE, tuple(range(len(contexts) + 1))
    else:
        ends = scheduled.counts.cumsum()
        wanted = last_ones(ends, scheduled.num_sampled)
        offsets = (0, *ends.tolist())
    lens = _rope_lens(table, length_rule, rows, positions)
    input_ids, places, slots, context_lens, indices, rope_lens = upload(
        [
            table.token_ids[rows, positions].astype(np.int64),
            positions,
            table.slots(rows, positions),
            scheduled.ends,
            wanted,
            _NONE if lens is None else lens,
        ]
    )
    if tables is None:
        (block_tables,) = upload([table.tables(scheduled.rows, max(contexts))])
    else:
        block_tables = tables(scheduled.rows, max(contexts))
    return ForwardBatch(
        input_ids=input_ids,
        positions=places,
        rope_lens=None if lens is None else rope_lens,
        slots=slots,
        block_tables=block_tables,
        context_lens=context_lens,
        cu_seqlens_q=offsets,
        host_context_lens=tuple(contexts),
        logits_indices=None if scheduled.is_decode else indices,
        is_decode=scheduled.is_decode,
    )


def _rope_lens(table: RowTable, rule: str | None, rows: Ints, positions: Ints) -> Ints | None:
    """The length that each token's rotation depends on; see RotaryEmbedding."""
    if rule is None:
        return None
    own = positions + 1
    if rule == "prompt":
        prompt_lens = table.prompt_lens[rows]
        return np.where(positions < prompt_lens, prompt_lens, own)
    # Input tokens use the length of the whole input, also with chunked prefill; tokens of a
    # recomputed row use its present length.
    return np.maximum(np.maximum(table.input_lens[rows], table.lens[rows] + 1), own)
