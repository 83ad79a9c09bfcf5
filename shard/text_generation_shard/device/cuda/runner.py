"""Steps on a stream: the host enqueues a whole step, and waits only for its tokens."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Upload
from text_generation_shard.device import base
from text_generation_shard.device.cuda.graphs import CudaRecorder, DeviceRows, Graphs, Recorder
from text_generation_shard.device.forward import ForwardBatch
from text_generation_shard.device.reference.runner import Forward, TorchRunner, forward_batch
from text_generation_shard.sampling.sampler import Choice, Sampler, Scores


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


class StreamRunner(TorchRunner):
    """See `Runner`. Owns the row state on the device: a step launched before the host knows the
    previous tokens reads them there."""

    def __init__(
        self,
        model: base.Model,
        forward: Forward,
        graphs: Graphs,
        stream: Stream,
        begin: Sampler[Tensor],
        make_rows: Callable[[base.Rows], DeviceRows],
        upload: Upload,
    ) -> None:
        """`begin` enqueues the choice of a step's tokens: `sampler.begin`."""
        super().__init__(forward, upload, model.length_rule)
        self.graphs, self.stream, self.begin = graphs, stream, begin
        self._make_rows = make_rows
        self.records_steps, self.compiles_steps = graphs.are_used, True
        self._rows: DeviceRows | None = None

    def rows(self, host: base.Rows) -> DeviceRows:
        """The row state on the device."""
        if self._rows is None or self._rows.rows is not host:
            # Free the old state before allocating the new one.
            self._rows = None
            self._rows = self._make_rows(host)
            self.graphs.use(self._rows)
        return self._rows

    @torch.inference_mode()
    def scores(self, rows: base.Rows, scheduled: base.ScheduledTokens, is_kept: bool) -> Scores:
        """See Runner."""
        own = self.rows(rows)
        if not self.graphs.suits(scheduled):
            return super().scores(rows, scheduled, is_kept)
        own.send(scheduled.rows)
        scores = self.graphs.scores(scheduled)
        return scores.clone() if is_kept else scores

    def _batch(self, rows: base.Rows, scheduled: base.ScheduledTokens) -> ForwardBatch:
        """The inputs of a pass, with the tokens that the host does not know yet."""
        own, waiting = self.rows(rows), scheduled.waiting
        own.send(scheduled.rows)
        batch = forward_batch(rows, scheduled, self._upload, self._length_rule, own.tables_of)
        if not len(waiting):
            return batch
        offsets = np.array(batch.cu_seqlens_q)
        places, waits = self._upload([offsets[waiting], scheduled.rows[waiting]])
        last = own.last_tokens.index_select(0, waits)
        return replace(batch, input_ids=batch.input_ids.index_copy(0, places, last.long()))

    @torch.inference_mode()
    def choose(self, scores: Scores, given: base.ChoiceInputs) -> base.Launched:
        """See Runner."""
        assert self._rows is not None, "scores come from a pass"
        found = self.begin(scores, *given)
        (own,) = self._upload([given.history.rows])
        self._rows.last_tokens.index_copy_(0, own, found[0].int())
        found = self.stream.fetch(found)
        return StreamStep(self.stream.mark(), scores, found)

    def mark(self) -> base.Launched:
        """See Runner."""
        return StreamStep(self.stream.mark())


class StreamStep(NamedTuple):
    """See `Launched`."""

    moment: Moment
    scores: Scores | None = None
    # The chosen tokens, valid after the moment: [3, S], see `sampler.begin`.
    found: Tensor | None = None

    def wait(self) -> None:
        """See Launched."""
        # `result` raises the error again.
        with suppress(Exception):
            self.moment.synchronize()

    @torch.inference_mode()
    def result(self) -> base.StepScores:
        """See Launched."""
        self.moment.synchronize()
        done = time.perf_counter_ns()
        if self.found is None or self.scores is None:
            return base.StepScores(None, done)
        token_ids, logprobs, _ = self.found.numpy()
        chosen = token_ids.astype(np.int64), logprobs.astype(np.float32)
        return base.StepScores(Choice(*chosen, self.scores), done)
