"""A planned step, as its device computes it."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from text_generation_proto import pb
from torch import Tensor

from text_generation_shard.arrays import Ints, Upload
from text_generation_shard.device.base import Rows, ScheduledTokens
from text_generation_shard.device.forward import ForwardBatch
from text_generation_shard.engine.forward_batch import (
    SampledPositions,
    forward_batch,
    sampled_positions,
)
from text_generation_shard.engine.pooled_outputs import pool_pass
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.step import PooledPart, PromptLogprobs
from text_generation_shard.errors import OwnError
from text_generation_shard.grammars.masks import StepGrammars
from text_generation_shard.models.base import LanguageModel
from text_generation_shard.sampling.sampler import (
    Choice,
    Chosen,
    Sampler,
    Scores,
    TokenHistory,
)
from text_generation_shard.sampling.table import Watermark

# Rows of prompt logits computed at once, which bounds their memory.
LOGPROB_ROWS = 256


@dataclass(frozen=True, slots=True)
class Fixed:
    """What all steps of an engine share."""

    model: LanguageModel
    table: RowTable
    upload: Upload
    length_rule: str | None
    # Tokens that end a text.
    end_ids: Ints
    watermark: Watermark
    # Only rank 0 follows grammars, because their limits of time and memory could differ by rank.
    follows_grammars: bool
    # Once set, a step fails before its next pass.
    is_stopping: threading.Event
    # Ids that are never chosen; None: all may be.
    unused_ids: Tensor | None


class Plan:
    """See `device.base.StepPlan`. Owns what its passes have found in prompts: log-probabilities and
    pooled outputs."""

    def __init__(
        self,
        fixed: Fixed,
        passes: Sequence[ScheduledTokens],
        recomputed: Sequence[ScheduledTokens],
        new_rows: Sequence[int],
        before: SampledPositions | None,
    ) -> None:
        """recomputed: passes that write existing KV again, before all others. before: the sampled
        positions of the step in flight, whose tokens the host does not know yet."""
        self.computed, self.new_rows = passes, new_rows
        self.rows: Rows = fixed.table
        self.passes: Sequence[ScheduledTokens] = (*recomputed, *passes)
        self.wants_hidden = bool(fixed.table.prompt_logprobs or fixed.table.pooled_outputs)
        self.wants_scores = bool(fixed.table.top_n_tokens)
        self.samples = sampled_positions(passes)
        self.sampled_rows = self.samples.rows
        self.knows_tokens = before is None or not fixed.table.depend_on_tokens(self.sampled_rows)
        # Set once the previous step is collected; None: no sampled row has a grammar.
        self.grammars: StepGrammars | None = None
        # By row, if requested.
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        # (row, part) if requested, in the order of tokens.
        self.pooled_outputs: list[tuple[int, PooledPart]] = []
        # [R] the requests of the rows that sample.
        self.request_ids = fixed.table.ids(self.samples.owners.tolist())
        self._fixed, self._before = fixed, before
        self._was_behind = before is not None

    def catch_up(self) -> None:
        """The previous step was collected: if this one is launched again, the host knows its
        inputs."""
        self._before, self.knows_tokens = None, True
        self.prompt_logprobs.clear()
        self.pooled_outputs.clear()

    def batch(
        self, scheduled: ScheduledTokens, tables: Callable[[Ints, int], Tensor] | None = None
    ) -> ForwardBatch:
        """See StepPlan."""
        fixed = self._fixed
        if fixed.is_stopping.is_set():
            raise OwnError("the shard is stopping")
        batch = forward_batch(scheduled, fixed.table, fixed.upload, fixed.length_rule, tables)
        if fixed.model.state_bytes:
            batch = replace(batch, states=fixed.table.states(scheduled))
        return batch

    def waiting(self, scheduled: ScheduledTokens) -> Ints:
        """See StepPlan."""
        if self._before is None:
            return scheduled.rows[:0]
        is_waiting = np.isin(scheduled.rows, self._before.rows)
        # A new request may have the row of a request that ended in the step in flight.
        return np.flatnonzero(is_waiting & ~np.isin(scheduled.rows, self.new_rows))

    def scores(self, scheduled: ScheduledTokens, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """See StepPlan."""
        wanted = batch.logits_indices
        if self.wants_hidden:
            self._add_prompt_logprobs(scheduled, hidden)
        logits = self._fixed.model.logits(hidden if wanted is None else hidden[wanted])
        if self._fixed.table.pooled_outputs:
            rest = self._fixed.model, scheduled, hidden, logits
            self.pooled_outputs += pool_pass(self._fixed.table, *rest)
        return logits

    def _add_prompt_logprobs(self, scheduled: ScheduledTokens, hidden: Tensor) -> None:
        """Add the log-probabilities of the input tokens that follow the tokens of this pass."""
        table, first = self._fixed.table, 0
        for index, row in enumerate(scheduled.rows.tolist()):
            part = hidden[first : first + int(scheduled.counts[index])]
            first += len(part)
            if row in table.prompt_logprobs:
                start, known = int(scheduled.starts[index]), int(table.input_lens[row])
                targets = table.token_ids[row, start + 1 : min(start + 1 + len(part), known)]
                # Empty if this step runs behind the one that completes the input.
                if len(targets) == 0:
                    continue
                none = PromptLogprobs(pb.PrefillLogprobs(), pb.PrefillTopTokens())
                found = self.prompt_logprobs.setdefault(row, none)
                num_top = table.top_n_tokens.get(row, 0)
                for at in range(0, len(targets), LOGPROB_ROWS):
                    some = torch.from_numpy(targets[at : at + LOGPROB_ROWS])
                    found.extend(self._logprobs(part[at : at + len(some)], some, num_top))

    def _logprobs(self, hidden: Tensor, targets: Tensor, num_top: int) -> PromptLogprobs:
        """The log-probabilities of `targets` [N] after hidden states [N, hidden_size], and of the
        `num_top` best tokens at the same positions."""
        wanted = targets.to(hidden.device, torch.int64)
        scores = torch.log_softmax(self._fixed.model.logits(hidden), dim=-1)
        own = scores.gather(1, wanted[:, None])
        ranks = 1 + (scores > own).sum(dim=1)
        found = pb.PrefillLogprobs(logprobs=own[:, 0].tolist(), ranks=ranks.tolist())
        best = pb.PrefillTopTokens()
        if num_top:
            top = scores.topk(min(num_top, scores.shape[1]))
            best.token_ids.extend(top.indices.flatten().tolist())
            best.logprobs.extend(top.values.flatten().tolist())
        return PromptLogprobs(found, best)

    def choose_by(self, sampler: Sampler[Chosen], scores: Scores) -> Chosen | None:
        """See StepPlan. Each position is sampled by itself; draft tokens are verified
        afterwards."""
        fixed, samples = self._fixed, self.samples
        if not len(scores):
            return None
        table = fixed.table
        history = TokenHistory(
            *(table.token_ids, samples.rows, samples.positions),
            *(table.prompt_lens, table.min_new_tokens),
        )
        if fixed.unused_ids is not None:
            scores[:, fixed.unused_ids] = -math.inf
        rest = fixed.end_ids, fixed.watermark, self.grammars
        return sampler(scores, table.sampling, history, *rest)

    def ended_rows(self) -> set[int]:
        """Rows whose requests ended in the previous step; they may have new requests now."""
        owners = zip(self.samples.owners.tolist(), self.request_ids, strict=True)
        return {owner[0] for owner in owners if not self._fixed.table.has(*owner)}

    def drop_ended(self, choice: Choice) -> Choice:
        """Remove the rows that ended in the previous step, which was in flight when this one was
        launched, from the choice, `samples` and `request_ids`."""
        ended = self.ended_rows() if self._was_behind else ()
        if not ended:
            return choice
        owners = self.samples.owners.tolist()
        kept = [index for index, row in enumerate(owners) if row not in ended]
        left = Choice(choice.token_ids[kept], choice.logprobs[kept], choice.scores[kept])
        # Each row samples once: a step launched behind another has no draft tokens.
        rows, index = self.samples.rows[kept], np.arange(len(kept) + 1)
        positions = self.samples.positions[kept]
        self.samples = SampledPositions(rows, positions, rows, index[:-1], index[1:], True)
        self.request_ids = [self.request_ids[index] for index in kept]
        if self.grammars is not None:
            self.grammars.keep(kept)
        return left
