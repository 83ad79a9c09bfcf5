"""Steps by torch: pass after pass, then a token for each position that gets one."""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.device.base import (
    ForwardBatch,
    Launched,
    Model,
    ScheduledTokens,
    StepPlan,
    StepScores,
)
from text_generation_shard.sampling.sampler import Choice, Sampler, Scores


class Forward(Protocol):
    """What computes a pass."""

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """The last hidden states [T, hidden_size] of all tokens."""

    def scores(self, batch: ForwardBatch) -> Tensor:
        """Those of the tokens whose logits are wanted [S, vocab_size]."""


class EagerForward:
    """The model's own layers, one operator after another."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        return self._model.forward(batch)

    def scores(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        hidden, wanted = self._model.forward(batch), batch.logits_indices
        return self._model.logits(hidden if wanted is None else hidden[wanted])


class Finished:
    """A step that was computed when it was launched."""

    def __init__(self, scores: StepScores) -> None:
        self._scores = scores

    def result(self) -> StepScores:
        """See Launched."""
        return self._scores


class TorchRunner:
    """Computes a step while it is launched."""

    def __init__(
        self,
        model: Model,
        forward: Forward,
        sampler: Sampler,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """`synchronize` waits until the device has done what it was asked for."""
        self._model, self._forward = model, forward
        self._sampler, self._synchronize = sampler, synchronize

    def launch(self, plan: StepPlan) -> Launched:
        """See Runner."""
        scores = [self._scores(plan, scheduled) for scheduled in plan.passes()]
        self._synchronize()
        done = time.perf_counter_ns()
        together = scores[0] if len(scores) == 1 else torch.cat([*map(torch.as_tensor, scores)])
        choice = self._choose(plan, together) if len(together) else None
        return Finished(StepScores(choice, done))

    @torch.inference_mode()
    def _choose(self, plan: StepPlan, scores: Scores) -> Choice:
        return plan.choose(scores, self._sampler)

    @torch.inference_mode()
    def _scores(self, plan: StepPlan, scheduled: ScheduledTokens) -> Scores:
        """Of the tokens of one pass after which one is chosen [S, vocab_size]."""
        batch = plan.batch(scheduled)
        if not plan.wants_hidden:
            return self._forward.scores(batch)
        hidden, wanted = self._forward.hidden(batch), batch.logits_indices
        plan.take_hidden(scheduled, hidden)
        return self._model.logits(hidden if wanted is None else hidden[wanted])
