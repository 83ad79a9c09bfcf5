"""Steps on a stream: the host enqueues a whole step, and waits only for its tokens."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Upload
from text_generation_shard.device import base
from text_generation_shard.device.cuda.graphs import CudaRecorder, Graphs, Recorder
from text_generation_shard.device.cuda.rows import DeviceRows
from text_generation_shard.device.forward import ForwardBatch
from text_generation_shard.device.reference.runner import Forward, pass_scores
from text_generation_shard.sampling.sampler import Choice, Sampler


class Moment(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream reaches it; raises errors of the device."""


class Stream(Protocol):
    """A queue of device operations."""

    def mark(self) -> Moment:
        """The point after all operations enqueued so far."""

    def fetch(self, found: Tensor) -> Tensor:
        """Start a copy to host memory, which completes before the next mark."""

    def recorder(self) -> Recorder:
        """A new recorder for this stream, with its own memory pool."""


class SynchronousStream:
    """See `Stream`: CPU tensors, computed synchronously."""

    def mark(self) -> Moment:
        """See Stream."""
        return self

    def synchronize(self) -> None:
        """See Moment."""

    def fetch(self, found: Tensor) -> Tensor:
        """See Stream."""
        return found

    def recorder(self) -> "SynchronousStream":
        """See Stream."""
        return self

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Recorder."""
        return work


class CudaStream:
    """See `Stream`: the current CUDA stream."""

    def mark(self) -> Moment:
        """See Stream."""
        # Waiting for a blocking event does not occupy a core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        moment: Moment = event
        return moment

    def fetch(self, found: Tensor) -> Tensor:
        """See Stream."""
        there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return there.copy_(found, non_blocking=True)

    def recorder(self) -> CudaRecorder:
        """See Stream."""
        return CudaRecorder()


class StreamRunner:
    """See `Runner`. Owns the row state on the device: a step launched before the host knows the
    previous tokens reads them there."""

    def __init__(
        self,
        forward: Forward,
        graphs: Graphs,
        stream: Stream,
        begin: Sampler[Tensor],
        make_rows: Callable[[base.Rows], DeviceRows],
        upload: Upload,
    ) -> None:
        """`begin` enqueues the choice of a step's tokens: `sampler.begin`."""
        self.graphs, self.stream, self.begin, self.upload = graphs, stream, begin, upload
        self._forward, self._make_rows = forward, make_rows
        self.records_steps, self.compiles_steps = graphs.are_used, True
        self._rows: DeviceRows | None = None
        self._last: StreamStep | None = None

    def rows(self, host: base.Rows) -> DeviceRows:
        """The row state on the device."""
        if self._rows is None or self._rows.rows is not host:
            # Free the old state before allocating the new one.
            self._rows = None
            self._rows = self._make_rows(host)
            self.graphs.use(self._rows)
        return self._rows

    @torch.inference_mode()
    def launch(self, plan: base.StepPlan) -> "StreamStep":
        """See Runner."""
        if self._last is not None and self._last.plan is not plan:
            # Its tokens may be inputs of this step.
            self._last.choose()
        # Release the memory of a step that is launched again.
        self._last = None
        rows = self.rows(plan.rows)
        scores = [self._scores(plan, scheduled, rows) for scheduled in plan.passes]
        self._last = StreamStep(self, plan, torch.cat(scores) if len(scores) > 1 else scores[0])
        if plan.knows_tokens:
            self._last.choose()
        return self._last

    def forget(self, step: "StreamStep") -> None:
        """Drop the reference to a step."""
        if self._last is step:
            self._last = None

    def _scores(
        self, plan: base.StepPlan, scheduled: base.ScheduledTokens, rows: DeviceRows
    ) -> Tensor:
        rows.send(scheduled.rows)
        waiting = plan.waiting(scheduled)
        if self.graphs.suits(plan, scheduled):
            scores = self.graphs.scores(scheduled, waiting)
            return scores.clone() if plan.wants_scores or len(plan.passes) > 1 else scores
        batch = plan.batch(scheduled, rows.tables_of)
        if len(waiting):
            batch = self._filled(batch, scheduled.rows, waiting, rows)
        return pass_scores(self._forward, plan, scheduled, batch)

    def _filled(
        self, batch: ForwardBatch, own: Ints, waiting: Ints, rows: DeviceRows
    ) -> ForwardBatch:
        """Fill in the tokens that the host does not know yet."""
        places, waits = self.upload([np.array(batch.cu_seqlens_q)[waiting], own[waiting]])
        last = rows.last_tokens.index_select(0, waits)
        return replace(batch, input_ids=batch.input_ids.index_copy(0, places, last.long()))


class StreamStep:
    """See `Launched`. Its tokens are chosen at the latest before the next launch, or in
    `result`."""

    def __init__(self, runner: StreamRunner, plan: base.StepPlan, scores: Tensor) -> None:
        self.plan = plan
        self._runner, self._scores = runner, scores
        self._moment = runner.stream.mark()
        # The chosen tokens, valid after the moment: [3, S], see `sampler.begin`.
        self._found: Tensor | None = None
        self._is_chosen = False
        self._error: Exception | None = None

    def choose(self) -> None:
        """Enqueue the choice, once; `result` raises its error."""
        if self._is_chosen:
            return
        self._is_chosen = True
        try:
            self._choose()
        except Exception as error:
            self._error = error

    def _choose(self) -> None:
        runner, plan = self._runner, self.plan
        found = plan.choose_by(runner.begin, self._scores)
        if found is not None:
            (rows,) = runner.upload([plan.sampled_rows])
            runner.rows(plan.rows).last_tokens.index_copy_(0, rows, found[0].int())
            found = runner.stream.fetch(found)
        self._found, self._moment = found, runner.stream.mark()

    def wait(self) -> None:
        """See Launched."""
        # `result` raises the error again.
        with suppress(Exception):
            self._moment.synchronize()

    @torch.inference_mode()
    def result(self) -> base.StepScores:
        """See Launched."""
        self.choose()
        self._runner.forget(self)
        if self._error is not None:
            raise self._error
        self._moment.synchronize()
        done, found = time.perf_counter_ns(), self._found
        if found is None:
            return base.StepScores(None, done)
        token_ids, logprobs, _ = found.numpy()
        chosen = token_ids.astype(np.int64), logprobs.astype(np.float32)
        return base.StepScores(Choice(*chosen, self._scores), done)
