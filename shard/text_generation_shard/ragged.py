"""Rows into the ragged inputs of forward passes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.batch import RowTable
from text_generation_shard.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of some rows, computed in one forward pass."""

    rows: list[int]
    starts: list[int]
    ends: list[int]


def pieces(rows: list[int], spans: list[tuple[int, int]], budget: int) -> Iterator[Piece]:
    """Cut the spans [start, end) of rows into passes of at most `budget` tokens."""
    piece, room = Piece([], [], []), budget
    for row, (start, end) in zip(rows, spans, strict=True):
        while start < end:
            step = min(room, end - start)
            piece.rows.append(row)
            piece.starts.append(start)
            piece.ends.append(start + step)
            start += step
            room -= step
            if room == 0:
                yield piece
                piece, room = Piece([], [], []), budget
    if piece.rows:
        yield piece


class RaggedBuilder:
    """Reads the row table (which it does not own) and builds one ForwardBatch after another.

    `length_rule` is RotaryEmbedding's: which length a token's rotation goes by.
    """

    def __init__(self, table: RowTable, device: torch.device, length_rule: str | None) -> None:
        self._table = table
        self._device = device
        self._length_rule = length_rule

    def ends_in(self, piece: Piece, place: int) -> bool:
        """Whether the row at `place` has its last token in this piece, and so wants a next one."""
        return piece.ends[place] == len(self._table.request(piece.rows[place]).input_ids)

    def piece_batch(self, piece: Piece) -> ForwardBatch:
        """A pass over part of some prompts; logits for the rows that end in it."""
        lengths = torch.tensor(piece.ends) - torch.tensor(piece.starts)
        rows = torch.tensor(piece.rows).repeat_interleave(lengths)
        positions = torch.cat(
            [torch.arange(a, b) for a, b in zip(piece.starts, piece.ends, strict=True)]
        )
        offsets = [0, *lengths.cumsum(0).tolist()]
        last = [
            offsets[place + 1] - 1 for place in range(len(piece.rows)) if self.ends_in(piece, place)
        ]
        return self._forward_batch(
            torch.tensor(piece.rows), rows, positions, piece.ends, offsets, last, False
        )

    def decode_batch(self, rows: Tensor) -> ForwardBatch:
        """A pass over the last known token of each row."""
        positions = self._table.lens[rows]
        count = len(rows)
        contexts = (positions + 1).tolist()
        return self._forward_batch(
            rows, rows, positions, contexts, list(range(count + 1)), list(range(count)), True
        )

    def _forward_batch(
        self,
        rows: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        contexts: list[int],
        offsets: list[int],
        logits_indices: list[int],
        is_decode: bool,
    ) -> ForwardBatch:
        table, device = self._table, self._device
        return ForwardBatch(
            input_ids=table.token_ids[token_rows, positions].to(device, torch.int64),
            positions=positions.to(device),
            rope_lens=self._rope_lens(token_rows, positions, is_decode),
            slots=table.slots(token_rows, positions).to(device),
            block_tables=table.tables(rows, max(contexts)).to(device),
            context_lens=torch.tensor(contexts, device=device),
            cu_seqlens_q=tuple(offsets),
            host_context_lens=tuple(contexts),
            logits_indices=torch.tensor(logits_indices, dtype=torch.int64, device=device),
            is_decode=is_decode,
        )

    def _rope_lens(self, rows: Tensor, positions: Tensor, is_decode: bool) -> Tensor | None:
        """The length each token's rope goes by; see RotaryEmbedding."""
        rule = self._length_rule
        if rule is None:
            return None
        own = positions + 1
        if rule == "prompt":
            prompt_lens = self._table.prompt_lens[rows]
            return torch.where(positions < prompt_lens, prompt_lens, own).to(self._device)
        if is_decode:
            return own.to(self._device)
        known = torch.tensor([len(self._table.request(row).input_ids) for row in rows.tolist()])
        # A recomputed row is longer than what was asked for: its present length counts.
        return torch.maximum(known, self._table.lens[rows] + 1).to(self._device)
