"""Computes planned steps: calls the device's runner with values, pass by pass."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
from text_generation_shard.engine.plan import Plan
from text_generation_shard.engine.prompt_outputs import read_pass
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.errors import OwnError
from text_generation_shard.models.registry import LanguageModel
from text_generation_shard.sampling import Scores, TokenHistory, Watermark


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
            plan.prompt_parts += read_pass(
                table, table.prompt_outputs, self.model, scheduled, hidden, logits
            )
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
