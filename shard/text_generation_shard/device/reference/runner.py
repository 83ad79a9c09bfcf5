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


class TorchRunner:
    """Computes a step while it is launched."""

    def __init__(
        self,
        forward: Forward,
        synchronize: Callable[[], None] = lambda: None,
        sampler: Sampler | None = None,
    ) -> None:
        """`synchronize` waits until the device has done what it was asked for. sampler: None is
        the definition."""
        self._forward = forward
        self._sampler, self._synchronize = sampler, synchronize

    def launch(self, plan: StepPlan) -> Launched:
        """See Runner."""
        scores = [self._scores(plan, scheduled) for scheduled in plan.passes()]
        self._synchronize()
        done = time.perf_counter_ns()
        together = scores[0] if len(scores) == 1 else torch.cat([*map(torch.as_tensor, scores)])
        return StepScores(self._choose(plan, together), done)

    @torch.inference_mode()
    def _choose(self, plan: StepPlan, scores: Scores) -> Choice | None:
        return plan.choose(scores, self._sampler)

    @torch.inference_mode()
    def _scores(self, plan: StepPlan, scheduled: ScheduledTokens) -> Scores:
        """Of the tokens of one pass after which one is chosen [S, vocab_size]."""
        if plan.wants_hidden:
            return plan.scores(scheduled, self._forward.hidden)
        return self._forward.scores(plan.batch(scheduled))
