"""The forward passes of a step, from the rows' spans to the tokens chosen after them."""

import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor

from text_generation_shard.arrays import Ints
from text_generation_shard.device.batch import RowBatch
from text_generation_shard.engine.forward_batch import (
    Choices,
    RaggedBuilder,
    Spans,
    choices_of,
    cut,
)
from text_generation_shard.engine.output import Chooser, ChosenTokens
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.errors import BatchError
from text_generation_shard.models.llama import LlamaModel

# Rows of prompt logits computed at once: bounds their memory to this many vocabularies.
LOGPROB_ROWS = 256
_STOPPING = "the shard is stopping"


class Step(NamedTuple):
    """A step that was computed, and is not in the row table yet."""

    passes: list[Spans]
    choices: Choices
    # None: nobody's input was complete.
    chosen: ChosenTokens | None
    # By row, of the inputs that want them.
    logprobs: dict[int, list[float]]
    # When the passes were done.
    forward: int


class StepRunner:
    """Runs steps over one row table, which it reads and never changes."""

    def __init__(
        self,
        model: LlamaModel,
        table: RowTable,
        chooser: Chooser,
        device: torch.device,
        max_prefill_tokens: int,
        is_stopping: threading.Event,
    ) -> None:
        """At most `max_prefill_tokens` of inputs are computed in one pass. Once `is_stopping` is
        set, a step of several passes fails at the next of them."""
        self._model = model
        self._table = table
        self._chooser = chooser
        self._device, self._is_cuda = device, device.type == "cuda"
        self._max_prefill_tokens = max_prefill_tokens
        self._builder = RaggedBuilder(table, device, model.rotary.length_rule)
        self._is_stopping = is_stopping

    def run(self, decoding: Spans | None, inputs: dict[int, tuple[int, int]]) -> Step:
        """Compute rows that decode and, row → [start, end), parts of inputs, in one pass unless
        the parts are too long for it; then choose."""
        if decoding is not None and decoding.is_plain and not inputs and self._model.scores_rows:
            return self._run_rows(decoding)
        with torch.inference_mode():
            return self._run(decoding, inputs)

    def _run_rows(self, decoding: Spans) -> Step:
        """`run` for one token of each row, the short way: where weights are not quantised, nothing
        is watermarked and no grammar followed, no operator of torch, each of which takes 20 to 30
        us when nothing of it is in the caches."""
        table, rows = self._table, decoding.rows
        table.check_covered(rows, decoding.ends)
        choices = choices_of([decoding])
        grammars = self._chooser.start(table, choices)
        if self._is_stopping.is_set():
            raise BatchError(_STOPPING)
        batch = RowBatch(rows, decoding.starts, table.token_ids, table.block_tables)
        scores = self._model.score_rows(batch)
        forward = time.perf_counter_ns()
        chosen = self._chooser.choose(table, choices, scores, grammars)
        return Step([decoding], choices, chosen, {}, forward)

    def _run(self, decoding: Spans | None, inputs: dict[int, tuple[int, int]]) -> Step:
        table = self._table
        passes = list(cut(list(inputs), list(inputs.values()), self._max_prefill_tokens, table))
        if decoding is not None:
            passes = [*passes[:-1], decoding.and_then(passes[-1]) if passes else decoding]
        for spans in passes:
            table.check_covered(spans.rows, spans.ends)
        if decoding is not None:
            self._recompute(decoding.rows)
        choices = choices_of(passes)
        grammars = self._chooser.start(table, choices)
        scores: list[Tensor] = []
        logprobs: dict[int, list[float]] = {}
        for spans in passes:
            if self._is_stopping.is_set():
                raise BatchError(_STOPPING)
            batch = self._builder.batch(spans)
            if table.prompt_logprobs:
                hidden, wanted = self._model.forward(batch), batch.logits_indices
                scores.append(self._model.logits(hidden if wanted is None else hidden[wanted]))
                self._add_prompt_logprobs(hidden, spans, batch.cu_seqlens_q, logprobs)
            else:
                scores.append(self._model.score(batch))
        self._synchronize()
        forward = time.perf_counter_ns()
        chosen, logits = None, scores[0] if len(scores) == 1 else torch.cat(scores)
        if len(logits):
            chosen = self._chooser.choose(table, choices, logits, grammars)
        return Step(passes, choices, chosen, logprobs, forward)

    def _add_prompt_logprobs(
        self,
        hidden: Tensor,
        spans: Spans,
        offsets: tuple[int, ...],
        logprobs: dict[int, list[float]],
    ) -> None:
        """Log-probabilities of what follows the computed tokens in the inputs that want them."""
        table = self._table
        for place, row in enumerate(spans.rows.tolist()):
            if row not in table.prompt_logprobs:
                continue
            part = hidden[offsets[place] : offsets[place + 1]]
            start, known = int(spans.starts[place]), int(table.input_lens[row])
            targets = table.token_ids[row, start + 1 : min(start + 1 + len(part), known)]
            values = logprobs.setdefault(row, [])
            for first in range(0, len(targets), LOGPROB_ROWS):
                part_of = torch.from_numpy(targets[first : first + LOGPROB_ROWS])
                wanted = part_of.to(self._device, torch.int64)
                logits = self._model.logits(part[first : first + len(wanted)])
                scores = torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None])
                values += scores[:, 0].tolist()

    def _recompute(self, rows: Ints) -> None:
        """Longrope: a row that outgrows the original context gets all its KV with the long factors,
        as transformers' Phi-3 does, so that a row's state depends on its tokens alone."""
        limit = self._model.rotary.recompute_at
        if limit is None:
            return
        outgrowing = rows[self._table.lens[rows] == limit].tolist()
        spans = [(0, limit)] * len(outgrowing)
        for part in cut(outgrowing, spans, self._max_prefill_tokens, self._table):
            self._model.forward(self._builder.batch(part))

    def _synchronize(self) -> None:
        """So that forward_ns is device time."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
