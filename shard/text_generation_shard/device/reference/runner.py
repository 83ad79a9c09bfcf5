"""Passes and choices in torch, computed during the call."""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import NO_INTS, Ints, Upload
from text_generation_shard.device import base
from text_generation_shard.device.base import ForwardBatch
from text_generation_shard.sampling import Scores, sample


class Forward(Protocol):
    """Computes a pass."""

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Last hidden states [T, hidden_size] of all tokens."""

    def scores(self, batch: ForwardBatch) -> Tensor:
        """Logits [S, vocab_size] of the tokens in `batch.logits_indices`."""


class EagerForward:
    """Runs the model's layers operator by operator."""

    def __init__(self, model: base.Model) -> None:
        self._model = model

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        return self._model.forward(batch)

    def scores(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        hidden, wanted = self._model.forward(batch), batch.logits_indices
        return self._model.logits(hidden if wanted is None else hidden[wanted])


def forward_batch(
    rows: base.Rows,
    scheduled: base.ScheduledTokens,
    upload: Upload,
    length_rule: str | None,
    tables: Callable[[Ints, int], Tensor] | None = None,
) -> ForwardBatch:
    """The inputs of a pass, on the device. upload: see Device; length_rule: see Model; tables, for
    devices that keep block tables: maps rows [R] and a number of tokens to block tables [R, width].
    """
    contexts = scheduled.ends.tolist()
    own, positions = scheduled.tokens()
    if scheduled.is_decode:
        wanted, offsets = NO_INTS, tuple(range(len(contexts) + 1))
    else:
        ends = scheduled.counts.cumsum()
        wanted = base.last_ones(ends, scheduled.num_sampled)
        offsets = (0, *ends.tolist())
    lens = _rope_lens(rows, length_rule, own, positions)
    block, within = np.divmod(positions, rows.block_size)
    input_ids, places, slots, context_lens, indices, rope_lens = upload(
        [
            rows.token_ids[own, positions].astype(np.int64),
            positions,
            rows.block_tables[own, block] * rows.block_size + within,
            scheduled.ends,
            wanted,
            NO_INTS if lens is None else lens,
        ]
    )
    longest = max(contexts)
    if tables is None:
        width = -(-longest // rows.block_size)
        (block_tables,) = upload([rows.block_tables[scheduled.rows, :width]])
    else:
        block_tables = tables(scheduled.rows, longest)
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
        states=scheduled.states,
    )


def _rope_lens(rows: base.Rows, rule: str | None, own: Ints, positions: Ints) -> Ints | None:
    """The length that the rotation of each token depends on; see RotaryEmbedding."""
    if rule is None:
        return None
    if rule == "prompt":
        prompt_lens = rows.prompt_lens[own]
        return np.where(positions < prompt_lens, prompt_lens, positions + 1)
    # Input tokens use the length of the whole input, also with chunked prefill; tokens of a
    # recomputed row use its present length.
    return np.maximum(np.maximum(rows.input_lens[own], rows.lens[own] + 1), positions + 1)


class TorchRunner:
    """See Runner."""

    records_steps = False
    compiles_steps = False

    def __init__(self, forward: Forward, upload: Upload, length_rule: str | None) -> None:
        self._forward, self._upload, self._length_rule = forward, upload, length_rule

    @torch.inference_mode()
    def hidden(self, rows: base.Rows, scheduled: base.ScheduledTokens) -> Tensor:
        """See Runner."""
        return self._forward.hidden(self._batch(rows, scheduled))

    @torch.inference_mode()
    def scores(self, rows: base.Rows, scheduled: base.ScheduledTokens, is_kept: bool) -> Scores:
        """See Runner."""
        return self._forward.scores(self._batch(rows, scheduled))

    def _batch(self, rows: base.Rows, scheduled: base.ScheduledTokens) -> ForwardBatch:
        return forward_batch(rows, scheduled, self._upload, self._length_rule)

    @torch.inference_mode()
    def choose(self, scores: Scores, given: base.ChoiceInputs) -> base.Launched:
        """See Runner."""
        done = time.perf_counter_ns()
        return base.StepScores(sample(scores, *given), done)

    def mark(self) -> base.Launched:
        """See Runner."""
        return base.StepScores(None, time.perf_counter_ns())
