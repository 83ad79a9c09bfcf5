"""Steps in torch: all passes in order, then the choice of tokens."""

import time
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.device import base
from text_generation_shard.device.forward import ForwardBatch
from text_generation_shard.sampling.sampler import sample


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


def pass_scores(
    forward: Forward, plan: base.StepPlan, scheduled: base.ScheduledTokens, batch: ForwardBatch
) -> Tensor:
    """Scores [S, vocab_size] of the sampled positions of a pass."""
    if plan.wants_hidden:
        return plan.scores(scheduled, batch, forward.hidden(batch))
    return forward.scores(batch)


class TorchRunner:
    """Computes a step during `launch`."""

    records_steps = False
    compiles_steps = False

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @torch.inference_mode()
    def launch(self, plan: base.StepPlan) -> base.StepScores:
        """See Runner."""
        scores = []
        for scheduled in plan.passes:
            scores.append(pass_scores(self._forward, plan, scheduled, plan.batch(scheduled)))
        done = time.perf_counter_ns()
        return base.StepScores(plan.choose_by(sample, torch.cat(scores)), done)
