"""Steps by torch: pass after pass, then a token for each position that gets one."""

import time
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.device import base
from text_generation_shard.device.forward import ForwardBatch


class Forward(Protocol):
    """What computes a pass."""

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """The last hidden states [T, hidden_size] of all tokens."""

    def scores(self, batch: ForwardBatch) -> Tensor:
        """Those of the tokens whose logits are wanted [S, vocab_size]."""


class EagerForward:
    """The model's own layers, one operator after another."""

    def __init__(self, model: base.Model) -> None:
        self._model = model

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        return self._model.forward(batch)

    def scores(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        hidden, wanted = self._model.forward(batch), batch.logits_indices
        return self._model.logits(hidden if wanted is None else hidden[wanted])


def pass_scores(
    forward: Forward, plan: base.StepPlan, scheduled: base.ScheduledTokens, batch: ForwardBatch
) -> Tensor:
    """Of the tokens of a pass after which one is sampled [S, vocab_size]."""
    if plan.wants_hidden:
        return plan.scores(scheduled, batch, forward.hidden(batch))
    return forward.scores(batch)


class TorchRunner:
    """Computes a step while it is launched."""

    records_steps = False

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @torch.inference_mode()
    def launch(self, plan: base.StepPlan) -> base.StepScores:
        """See Runner."""
        scores = []
        for scheduled in plan.passes:
            scores.append(pass_scores(self._forward, plan, scheduled, plan.batch(scheduled)))
        done = time.perf_counter_ns()
        return base.StepScores(plan.choose(torch.cat(scores)), done)
