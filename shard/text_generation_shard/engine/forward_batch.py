"""Rows into the ragged inputs of forward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints
from text_generation_shard.device.batch import ForwardBatch
from text_generation_shard.engine.row_table import RowTable


@dataclass(frozen=True, slots=True)
class Spans:
    """What one forward pass computes of R rows: `lengths` tokens of each, from `starts` on.

    A token is chosen after each of a row's last `choices` tokens. All are [R].
    """

    rows: Ints
    starts: Ints
    lengths: Ints
    choices: Ints
    # Every row has one token, and a choice after it.
    is_plain: bool = False
    # Where the tokens of each row end.
    ends: Ints = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", self.starts + self.lengths)

    def and_then(self, other: "Spans") -> "Spans":
        """One pass for these rows and those."""
        return Spans(
            np.concatenate((self.rows, other.rows)),
            np.concatenate((self.starts, other.starts)),
            np.concatenate((self.lengths, other.lengths)),
            np.concatenate((self.choices, other.choices)),
        )


def plain_spans(rows: Ints, starts: Ints) -> Spans:
    """One token of each row, and a choice after it."""
    ones = np.ones(len(rows), dtype=np.int64)
    return Spans(rows, starts, ones, ones, is_plain=True)


class Choices(NamedTuple):
    """Where a step chooses tokens: S places, those of one row one after another."""

    # [S] the row of each place and how many tokens are known there: the chosen one's position.
    rows: Ints
    known: Ints
    # [R] rows that choose, and the first and one past the last of their places.
    owners: Ints
    firsts: Ints
    ends: Ints
    # Every row has one place.
    is_single: bool


def choices_of(passes: Sequence[Spans]) -> Choices:
    """The places of a step that takes these passes one after another."""
    if len(passes) == 1 and passes[0].is_plain:
        spans = passes[0]
        places = np.arange(len(spans.rows) + 1)
        return Choices(spans.rows, spans.ends, spans.rows, places[:-1], places[1:], True)
    counts = np.concatenate([spans.choices for spans in passes])
    is_choosing = counts > 0
    counts = counts[is_choosing]
    owners = np.concatenate([spans.rows for spans in passes])[is_choosing]
    known = np.concatenate([spans.ends for spans in passes])[is_choosing]
    ends = counts.cumsum()
    firsts = ends - counts
    rows, known = np.repeat(owners, counts), _last_ones(known + 1, counts)
    return Choices(rows, known, owners, firsts, ends, len(rows) == len(owners))


def _last_ones(ends: Ints, counts: Ints) -> Ints:
    """The last `counts` numbers before each of `ends`, one after another."""
    shifts: Ints = np.repeat(ends - counts.cumsum(), counts)
    return shifts + np.arange(len(shifts))


def cut(
    rows: Sequence[int], spans: Sequence[tuple[int, int]], budget: int, table: RowTable
) -> Iterator[Spans]:
    """Cut the tokens [start, end) of rows into passes of at most `budget` tokens; who has its whole
    input computed at the end of one gets a choice."""
    piece: list[tuple[int, int, int]] = []
    room = budget
    for row, (start, end) in zip(rows, spans, strict=True):
        while start < end:
            step = min(room, end - start)
            piece.append((row, start, step))
            start += step
            room -= step
            if room == 0:
                yield _to_spans(piece, table)
                piece, room = [], budget
    if piece:
        yield _to_spans(piece, table)


def _to_spans(piece: list[tuple[int, int, int]], table: RowTable) -> Spans:
    rows, starts, lengths = np.array(piece, dtype=np.int64).T.copy()
    is_complete = starts + lengths == table.input_lens[rows]
    return Spans(rows, starts, lengths, is_complete.astype(np.int64))


class RaggedBuilder:
    """Reads the row table (which it does not own) and builds one ForwardBatch after another.

    `length_rule` is RotaryEmbedding's: which length a token's rotation goes by.
    """

    def __init__(self, table: RowTable, device: torch.device, length_rule: str | None) -> None:
        self._table = table
        # What leaves arrays where they are still takes time.
        self._device = None if device.type == "cpu" else device
        self._length_rule = length_rule

    def batch(self, spans: Spans) -> ForwardBatch:
        """The inputs of the pass that computes `spans`."""
        table = self._table
        contexts = spans.ends.tolist()
        if spans.is_plain:
            rows, positions, wanted = spans.rows, spans.starts, None
            offsets = tuple(range(len(contexts) + 1))
        else:
            rows = np.repeat(spans.rows, spans.lengths)
            positions = _last_ones(spans.ends, spans.lengths)
            ends = spans.lengths.cumsum()
            wanted = self._send(_last_ones(ends, spans.choices))
            offsets = (0, *ends.tolist())
        return ForwardBatch(
            input_ids=self._send(table.token_ids[rows, positions].astype(np.int64)),
            positions=self._send(positions),
            rope_lens=self._rope_lens(rows, positions),
            slots=self._send(table.slots(rows, positions)),
            block_tables=self._send(table.tables(spans.rows, max(contexts))),
            context_lens=self._send(spans.ends),
            cu_seqlens_q=offsets,
            host_context_lens=tuple(contexts),
            logits_indices=wanted,
            is_decode=spans.is_plain,
        )

    def _send(self, values: Ints) -> Tensor:
        """To the device."""
        sent = torch.from_numpy(values)
        return sent if self._device is None else sent.to(self._device)

    def _rope_lens(self, rows: Ints, positions: Ints) -> Tensor | None:
        """The length each token's rope goes by; see RotaryEmbedding."""
        table, rule = self._table, self._length_rule
        if rule is None:
            return None
        own = positions + 1
        if rule == "prompt":
            prompt_lens = table.prompt_lens[rows]
            lens = np.where(positions < prompt_lens, prompt_lens, own)
        else:
            # A prompt's tokens go by the whole input, however it is cut; those of a row that is
            # computed anew by its present length.
            lens = np.maximum(table.input_lens[rows], table.lens[rows] + 1)
            lens = np.maximum(lens, own)
        return self._send(lens)
