"""Steps on a stream: the host enqueues a whole step, and waits only for its tokens.

Passes that sample after every token are CUDA graphs, one for each of a few sizes. Every token is a
row of its own there, so that decoding rows and draft tokens are treated alike. A pass is padded to
its size with tokens of no request. A pass without a graph yet is computed in the same way, operator
by operator.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens, Upload
from text_generation_shard.device import base
from text_generation_shard.device.base import ForwardBatch
from text_generation_shard.device.reference.runner import Forward, TorchRunner, forward_batch
from text_generation_shard.sampling import Choice, Sampler, Scores

logger = logging.getLogger(__name__)

# A size is recorded at its fourth use, so that frequent sizes are recorded first.
_ASKED = 4
# Context sizes: the smallest, and the ratio of each size to the previous one.
_LEAST_CONTEXT, _CONTEXT_RATIO = 512, 4
# Most graphs of a device; bounds the memory that each takes beside the pool shared by all.
_MOST_RECORDED = 128
# Default sizes: these, then multiples of 8 up to the number of rows or this maximum.
_SMALL_SIZES, _LARGEST_SIZE = (1, 2, 4, 8), 512
# Inputs of each token: row, id (-1: the row's last token on the device), position, slot, context.
_NUM_INPUTS = 5


class DeviceRows:
    """Owns the device's copy of each row's last token and block table.

    Both have one additional row, which belongs to no request. All its blocks are the spare block of
    the cache.
    """

    def __init__(self, rows: base.Rows, device: torch.device, upload: Upload) -> None:
        """`rows`: the row state on the host."""
        self.rows = rows
        capacity, width = rows.block_tables.shape
        self.last_tokens = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        self.tables = torch.zeros(capacity + 1, width, dtype=torch.int32, device=device)
        self.tables[capacity] = rows.num_cache_blocks
        self._upload = upload
        # The part of each row's table that is on the device: request number and number of blocks.
        self._takes: Ints = np.zeros(capacity, dtype=np.int64)
        self._counts: Ints = np.zeros(capacity, dtype=np.int64)

    def send(self, used: Ints) -> None:
        """Send the new entries of the block tables that a pass uses."""
        rows = self.rows
        is_same = self._takes[used] == rows.num_takes[used]
        first = np.where(is_same, self._counts[used], 0)
        counts = rows.num_blocks[used] - first
        if not counts.any():
            return
        own = np.repeat(used, counts)
        at = base.last_ones(rows.num_blocks[used], counts)
        blocks: Tokens = rows.block_tables[own, at].astype(np.int32)
        places, values = self._upload([own * self.tables.shape[1] + at, blocks])
        self.tables.view(-1).index_copy_(0, places, values)
        # Only after the copy, which may have failed for lack of memory.
        self._takes[used], self._counts[used] = rows.num_takes[used], rows.num_blocks[used]

    def tables_of(self, rows: Ints, longest: int) -> Tensor:
        """Block tables [R, width] of `rows`, wide enough for a context of `longest` tokens."""
        (places,) = self._upload([rows])
        return self.narrow(longest).index_select(0, places)

    def narrow(self, longest: int) -> Tensor:
        """`tables`, narrowed to the width of a context of `longest` tokens."""
        return self.tables[:, : -(-longest // self.rows.block_size)]


Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Given work that was called before, returns a function that replays it on the same memory."""


class Stream:
    """A queue of device operations; here of CPU tensors, which are computed during the calls."""

    def mark(self) -> Callable[[], None]:
        """Returns a function that waits for all operations enqueued so far, and raises errors of
        the device."""
        return lambda: None

    def fetch(self, found: Tensor) -> Tensor:
        """Start a copy to host memory, which completes before the next mark."""
        return found

    def recorder(self) -> Recorder:
        """A new recorder for this stream, with its own memory pool."""
        return lambda work: work


class CudaStream(Stream):
    """The current CUDA stream."""

    def mark(self) -> Callable[[], None]:
        """See Stream."""
        # Waiting for a blocking event does not occupy a core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def fetch(self, found: Tensor) -> Tensor:
        """See Stream."""
        there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return there.copy_(found, non_blocking=True)

    def recorder(self) -> Recorder:
        """See Stream. All graphs share one pool: they never run at the same time, and keep no
        results in it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()

        def record(work: Callable[[], None]) -> Callable[[], None]:
            graph = torch.cuda.CUDAGraph()
            # During the capture, another thread may wait for an event.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                work()
            return graph.replay

        return record


def sizes_of(asked: Sequence[int] | None, num_rows: int) -> tuple[int, ...]:
    """Sizes in ascending order: the requested ones, or the default for this number of rows."""
    if asked is not None:
        return tuple(sorted(set(asked)))
    most = min(num_rows, _LARGEST_SIZE)
    small = [size for size in _SMALL_SIZES if size < most]
    return (*small, *range(16, most, 8), most)


class _Kind(NamedTuple):
    """The most tokens of a recorded pass, and the longest context of each."""

    size: int
    context: int


class Graphs:
    """Owns the recorded graphs, and the memory of their inputs and scores."""

    def __init__(
        self,
        model: base.Model,
        asked: Sequence[int] | None,
        make_recorder: Callable[[], Recorder],
        upload: Upload,
    ) -> None:
        """asked: requested sizes in tokens, see `sizes_of`; empty: nothing is recorded."""
        self._model, self._asked, self._upload = model, asked, upload
        self._make_recorder = make_recorder
        self.are_used = model.is_recordable and asked != ()
        self._sizes: tuple[int, ...] = ()

    def use(self, state: DeviceRows) -> None:
        """Discard all graphs, and use these rows from now on."""
        self._state, device = state, state.tables.device
        self._recorder = self._make_recorder()
        # None: recording failed.
        self._recorded: dict[_Kind, Callable[[], None] | None] = {}
        self._num_asked: Counter[_Kind] = Counter()
        if self.are_used:
            self._sizes = sizes_of(self._asked, len(state.rows.num_blocks))
            self._model.prepare_recording(self._longest)
            count = _NUM_INPUTS * self._sizes[-1]
            self._given = torch.zeros(count, dtype=torch.int32, device=device)
            self._scores = torch.empty(0, device=device)

    @property
    def _longest(self) -> int:
        """Most tokens of a context."""
        width: int = self._state.rows.block_tables.shape[1]
        return width * self._model.attention.block_size

    def suits(self, scheduled: base.ScheduledTokens) -> bool:
        """Whether `scores` supports this pass."""
        if not self.are_used:
            return False
        is_sampled = scheduled.is_decode or bool((scheduled.num_sampled == scheduled.counts).all())
        return is_sampled and int(scheduled.counts.sum()) <= self._sizes[-1]

    def scores(self, scheduled: base.ScheduledTokens) -> Tensor:
        """Scores [T, vocab_size] of all tokens of a pass, valid until the next pass."""
        own, positions = scheduled.tokens()
        kind = self._kind(len(own), int(scheduled.ends.max()))
        firsts = scheduled.counts.cumsum() - scheduled.counts
        self._fill(kind.size, own, positions, firsts[scheduled.waiting])
        work = self._recorded.get(kind)
        if work is not None:
            work()
        else:
            self._compute(kind)
            self._num_asked[kind] += 1
            if self._num_asked[kind] >= _ASKED and kind not in self._recorded:
                self._record(kind)
        return self._scores[: len(own)]

    def _kind(self, count: int, longest: int) -> _Kind:
        context = _LEAST_CONTEXT
        while context < longest:
            context *= _CONTEXT_RATIO
        size = next(size for size in self._sizes if size >= count)
        return _Kind(size, min(context, self._longest))

    def _fill(self, size: int, own: Ints, positions: Ints, unknown: Ints) -> None:
        """Write the inputs of a pass of rows `own` and positions [T] to the graphs' input memory.
        The tokens `unknown` [W] take their rows' last tokens on the device as ids."""
        rows, block_size = self._state.rows, self._model.attention.block_size
        capacity, count = len(rows.num_blocks), len(own)
        given: Tokens = np.zeros((_NUM_INPUTS, size), dtype=np.int32)
        block, within = np.divmod(positions, block_size)
        slots = rows.block_tables[own, block] * block_size + within
        ids = rows.token_ids[own, positions]
        ids[unknown] = -1
        given[:, :count] = own, ids, positions, slots, positions + 1
        # Padding: one token in the spare block.
        spare = rows.num_cache_blocks * block_size
        given[:, count:] = np.array((capacity, 0, 0, spare, 1))[:, None]
        (sent,) = self._upload([given.reshape(-1)])
        self._given[: len(sent)].copy_(sent)

    def _compute(self, kind: _Kind) -> None:
        """Compute a pass from the inputs in the input memory; write its scores."""
        size, context = kind
        model, state = self._model, self._state
        given = self._given[: _NUM_INPUTS * size].view(_NUM_INPUTS, size)
        rows, ids, positions, slots, context_lens = given.unbind()
        batch = ForwardBatch(
            input_ids=torch.where(ids < 0, state.last_tokens.index_select(0, rows), ids),
            positions=positions,
            rope_lens=None,
            slots=slots,
            block_tables=state.narrow(context).index_select(0, rows),
            context_lens=context_lens,
            cu_seqlens_q=tuple(range(size + 1)),
            host_context_lens=(context,) * size,
            logits_indices=None,
            is_decode=True,
        )
        scores = model.logits(model.forward(batch))
        if not len(self._scores):
            self._scores = scores.new_empty(self._sizes[-1], scores.shape[1])
        self._scores[:size].copy_(scores)

    def _record(self, kind: _Kind) -> None:
        if len(self._recorded) == _MOST_RECORDED:
            return
        self._recorded[kind] = None
        try:
            self._recorded[kind] = self._recorder(lambda: self._compute(kind))
        except RuntimeError as error:
            logger.warning(
                "steps of %d tokens are not recorded, which makes them slower: %s; if the GPU's "
                "memory is full, decrease --cuda-memory-fraction",
                kind.size,
                str(error).splitlines()[0],
            )

    @torch.inference_mode()
    def bytes_of_all(self, held: Callable[[], int]) -> int:
        """Memory of all graphs, extrapolated from two that are recorded and discarded. `held`
        returns the device memory in use."""
        if not self.are_used:
            return 0
        kinds = [_Kind(size, self._longest) for size in reversed(self._sizes)]
        no_rows: Ints = np.empty(0, dtype=np.int64)
        found = []
        for kind in kinds[:2]:
            self._fill(kind.size, no_rows, no_rows, no_rows)
            self._compute(kind)
            before = held()
            self._record(kind)
            found.append(held() - before)
        self.use(self._state)
        contexts = {self._kind(1, end).context for end in range(1, self._longest + 1, 16)}
        most = min(_MOST_RECORDED, len(self._sizes) * len(contexts))
        return found[0] + found[-1] * (most - 1)


class StreamRunner(TorchRunner):
    """See `Runner`. Owns the row state on the device: a step launched before the host knows the
    previous tokens reads them there."""

    def __init__(
        self,
        model: base.Model,
        forward: Forward,
        cuda_graphs: Sequence[int] | None,
        stream: Stream,
        begin: Sampler[Tensor],
        device: torch.device,
        upload: Upload,
    ) -> None:
        """cuda_graphs: see DeviceOptions. `begin` enqueues the choice of a step's tokens:
        `sampler.begin`."""
        super().__init__(forward, upload, model.length_rule)
        self.graphs = Graphs(model, cuda_graphs, stream.recorder, upload)
        self.stream, self.begin, self._device = stream, begin, device
        self.records_steps, self.compiles_steps = self.graphs.are_used, True
        self._rows: DeviceRows | None = None

    def rows(self, host: base.Rows) -> DeviceRows:
        """The row state on the device."""
        if self._rows is None or self._rows.rows is not host:
            # Free the old state before allocating the new one.
            self._rows = None
            self._rows = DeviceRows(host, self._device, self._upload)
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

    # See `Stream.mark`.
    synchronize: Callable[[], None]
    scores: Scores | None = None
    # The chosen tokens, valid after `synchronize`: [3, S], see `sampler.begin`.
    found: Tensor | None = None

    def wait(self) -> None:
        """See Launched."""
        # `result` raises the error again.
        with suppress(Exception):
            self.synchronize()

    @torch.inference_mode()
    def result(self) -> base.StepScores:
        """See Launched."""
        self.synchronize()
        done = time.perf_counter_ns()
        if self.found is None or self.scores is None:
            return base.StepScores(None, done)
        token_ids, logprobs, _ = self.found.numpy()
        chosen = token_ids.astype(np.int64), logprobs.astype(np.float32)
        return base.StepScores(Choice(*chosen, self.scores), done)
