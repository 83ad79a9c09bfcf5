"""Rows into the ragged inputs of forward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.forward import ForwardBatch
from text_generation_shard.rows import RowTable


@dataclass(frozen=True, slots=True)
class Spans:
    """What one forward pass computes of R rows: `lengths` tokens of each, from `starts` on.

    A token is chosen after each of a row's last `choices` tokens. All are host tensors [R].
    """

    rows: Tensor
    starts: Tensor
    lengths: Tensor
    choices: Tensor
    # Every row has one token, and a choice after it.
    is_plain: bool = False

    @property
    def ends(self) -> Tensor:
        """Where the tokens of each row end."""
        return self.starts + self.lengths

    def and_then(self, other: "Spans") -> "Spans":
        """One pass for these rows and those."""
        return Spans(
            torch.cat((self.rows, other.rows)),
            torch.cat((self.starts, other.starts)),
            torch.cat((self.lengths, other.lengths)),
            torch.cat((self.choices, other.choices)),
        )


def plain_spans(rows: Tensor, starts: Tensor) -> Spans:
    """One token of each row, and a choice after it."""
    ones = torch.ones_like(rows)
    return Spans(rows, starts, ones, ones, is_plain=True)


@dataclass(frozen=True, slots=True)
class Choices:
    """Where a step chooses tokens: S places, those of one row one after another."""

    # [S] the row of each place and how many tokens are known there: the chosen one's position.
    rows: Tensor
    known: Tensor
    # [R] rows that choose, and the first and one past the last of their places.
    owners: Tensor
    firsts: Tensor
    ends: Tensor
    # Every row has one place.
    is_single: bool


def choices_of(passes: Sequence[Spans]) -> Choices:
    """The places of a step that takes these passes one after another."""
    if len(passes) == 1 and passes[0].is_plain:
        spans = passes[0]
        firsts = torch.arange(len(spans.rows))
        return Choices(spans.rows, spans.ends, spans.rows, firsts, firsts + 1, True)
    counts = torch.cat([spans.choices for spans in passes])
    is_choosing = counts > 0
    counts = counts[is_choosing]
    owners = torch.cat([spans.rows for spans in passes])[is_choosing]
    known = torch.cat([spans.ends for spans in passes])[is_choosing]
    ends = counts.cumsum(0)
    firsts = ends - counts
    rows, known = repeated(owners, counts), _last_ones(known + 1, counts)
    return Choices(rows, known, owners, firsts, ends, len(rows) == len(owners))


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """Each of the values [R], on the host, as often as counts [R] say.

    torch's own repeat_interleave starts all threads for a handful of numbers: milliseconds where
    the machine is busy.
    """
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def _last_ones(ends: Tensor, counts: Tensor) -> Tensor:
    """The last `counts` numbers before each of `ends`, one after another."""
    shifts = repeated(ends - counts.cumsum(0), counts)
    return torch.arange(len(shifts)) + shifts


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
    rows, starts, lengths = torch.tensor(piece).unbind(1)
    is_complete = starts + lengths == table.input_lens[rows]
    return Spans(rows, starts, lengths, is_complete.long())


class RaggedBuilder:
    """Reads the row table (which it does not own) and builds one ForwardBatch after another.

    `length_rule` is RotaryEmbedding's: which length a token's rotation goes by.
    """

    def __init__(self, table: RowTable, device: torch.device, length_rule: str | None) -> None:
        self._table = table
        self._device = device
        self._length_rule = length_rule

    def batch(self, spans: Spans) -> ForwardBatch:
        """The inputs of the pass that computes `spans`."""
        table, device = self._table, self._device
        contexts = spans.ends.tolist()
        if spans.is_plain:
            rows, positions, wanted = spans.rows, spans.starts, None
            offsets = tuple(range(len(contexts) + 1))
        else:
            rows = repeated(spans.rows, spans.lengths)
            positions = _last_ones(spans.ends, spans.lengths)
            ends = spans.lengths.cumsum(0)
            wanted = _last_ones(ends, spans.choices).to(device)
            offsets = (0, *ends.tolist())
        return ForwardBatch(
            input_ids=table.token_ids[rows, positions].to(device, torch.int64),
            positions=positions.to(device),
            rope_lens=self._rope_lens(rows, positions),
            slots=table.slots(rows, positions).to(device),
            block_tables=table.tables(spans.rows, max(contexts)).to(device),
            context_lens=spans.ends.to(device),
            cu_seqlens_q=offsets,
            host_context_lens=tuple(contexts),
            logits_indices=wanted,
            is_decode=spans.is_plain,
        )

    def _rope_lens(self, rows: Tensor, positions: Tensor) -> Tensor | None:
        """The length each token's rope goes by; see RotaryEmbedding."""
        table, rule = self._table, self._length_rule
        if rule is None:
            return None
        own = positions + 1
        if rule == "prompt":
            prompt_lens = table.prompt_lens[rows]
            lens = torch.where(positions < prompt_lens, prompt_lens, own)
        else:
            # A prompt's tokens go by the whole input, however it is cut; those of a row that is
            # computed anew by its present length.
            lens = torch.maximum(table.input_lens[rows], table.lens[rows] + 1)
            lens = torch.maximum(lens, own)
        return lens.to(self._device)
