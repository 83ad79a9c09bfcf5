"""Passes of which every token is sampled after, recorded once for each of a few sizes: from then on
a device gets all of such a pass in one piece.

A token is a row of its own here, so that rows that decode and guesses behind them are alike. A pass
is filled up to its size with tokens of no request. What is not recorded yet is computed in the same
way, operator after operator.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Ints, Tokens, Upload
from text_generation_shard.device import base
from text_generation_shard.device.cuda.device_rows import DeviceRows
from text_generation_shard.device.forward import ForwardBatch

logger = logging.getLogger(__name__)

# A size is recorded when it is asked for the fourth time: those that are asked for most come first.
_ASKED = 4
# Contexts, too, are recorded in a few sizes, each this number of times the previous size.
_LEAST_CONTEXT, _CONTEXT_RATIO = 512, 4
# Of one device: bounds what they take beside the memory that they compute in, which is one.
_MOST_RECORDED = 128
# Sizes, where none are given: these, and then every 8 up to the number of rows, or this number.
_SMALL_SIZES, _LARGEST_SIZE = (1, 2, 4, 8), 512
# Of each token: its row, id (-1: what the row got last), position, slot and context.
_NUM_INPUTS = 5


class Recorder(Protocol):
    """Records what a device is given."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What gives the device all of `work` at once, in the same memory. `work` was called
        before; nothing of it need be computed now."""


class CudaRecorder:
    """See Recorder: CUDA graphs. Owns the memory that they compute in, the same for all: no two of
    them compute at the same time, and nothing is left in it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for an event meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


def sizes_of(asked: Sequence[int] | None, num_rows: int) -> tuple[int, ...]:
    """In rising order: what was asked for, or the default for this number of rows."""
    if asked is not None:
        return tuple(sorted(set(asked)))
    most = min(num_rows, _LARGEST_SIZE)
    small = [size for size in _SMALL_SIZES if size < most]
    return (*small, *range(16, most, 8), most)


class _Kind(NamedTuple):
    """What a recorded pass has, at most: tokens, and the context of each."""

    size: int
    context: int


class Graphs:
    """Owns what was recorded, and the memory that it reads its inputs from and writes scores to."""

    def __init__(
        self,
        model: base.Model,
        asked: Sequence[int] | None,
        make_recorder: Callable[[], Recorder],
        upload: Upload,
    ) -> None:
        """asked: numbers of tokens, see `sizes_of`; empty: nothing is recorded."""
        self._model, self._asked, self._upload = model, asked, upload
        self._make_recorder = make_recorder
        # Where a length matters, angles are not in one table.
        self.are_used = model.length_rule is None and asked != ()
        self._sizes: tuple[int, ...] = ()

    def use(self, state: DeviceRows) -> None:
        """Forget what was recorded for other rows, or another cache."""
        self._state, device = state, state.tables.device
        self._recorder = self._make_recorder()
        # None: it could not be recorded.
        self._recorded: dict[_Kind, Callable[[], None] | None] = {}
        self._num_asked: Counter[_Kind] = Counter()
        if self.are_used:
            self._sizes = sizes_of(self._asked, len(state.rows.num_blocks))
            # It never grows again: what is recorded reads it.
            self._model.angle_table(self._longest)
            count = _NUM_INPUTS * self._sizes[-1]
            self._given = torch.zeros(count, dtype=torch.int32, device=device)
            self._scores = torch.empty(0, device=device)

    @property
    def _longest(self) -> int:
        """Of a context, the most tokens."""
        width: int = self._state.rows.block_tables.shape[1]
        return width * self._model.attention.block_size

    def suits(self, plan: base.StepPlan, scheduled: base.ScheduledTokens) -> bool:
        """Whether `scores` computes this pass."""
        if plan.wants_hidden or not self.are_used:
            return False
        is_sampled = scheduled.is_decode or bool((scheduled.num_sampled == scheduled.counts).all())
        return is_sampled and int(scheduled.counts.sum()) <= self._sizes[-1]

    def scores(self, scheduled: base.ScheduledTokens, waiting: Ints) -> Tensor:
        """Of all tokens of a pass [T, vocab_size], until the next pass; waiting: StepPlan's."""
        own, positions = scheduled.tokens()
        kind = self._kind(len(own), int(scheduled.ends.max()))
        self._fill(
            kind.size, own, positions, (scheduled.counts.cumsum() - scheduled.counts)[waiting]
        )
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
        """The inputs of a pass of these rows and positions [T], to where it is recorded to read
        them; the ids of the tokens `unknown` [W] are what their rows got last."""
        rows, block_size = self._state.rows, self._model.attention.block_size
        capacity, count = len(rows.num_blocks), len(own)
        given: Tokens = np.zeros((_NUM_INPUTS, size), dtype=np.int32)
        block, within = np.divmod(positions, block_size)
        slots = rows.block_tables[own, block] * block_size + within
        ids = rows.token_ids[own, positions]
        ids[unknown] = -1
        given[:, :count] = own, ids, positions, slots, positions + 1
        # What fills up: one token in a block that no request has.
        spare = rows.num_cache_blocks * block_size
        given[:, count:] = np.array((capacity, 0, 0, spare, 1))[:, None]
        (sent,) = self._upload([given.reshape(-1)])
        self._given[: len(sent)].copy_(sent)

    def _compute(self, kind: _Kind) -> None:
        """A pass, from the inputs that are there to the scores."""
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
            self._recorded[kind] = self._recorder.record(lambda: self._compute(kind))
        except RuntimeError as error:
            logger.warning(
                "steps of %d tokens are not recorded, which makes them slower: %s; if the GPU's "
                "memory is full, decrease --cuda-memory-fraction",
                kind.size,
                str(error).splitlines()[0],
            )

    @torch.inference_mode()
    def bytes_of_all(self, held: Callable[[], int]) -> int:
        """What all that may be recorded takes, by what two of them take, which are forgotten then.
        `held` answers how much of the device's memory is taken."""
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
        return found[0] + found[-1] * (self._most_recorded - 1)

    @property
    def _most_recorded(self) -> int:
        contexts = {self._kind(1, end).context for end in range(1, self._longest + 1, 16)}
        return min(_MOST_RECORDED, len(self._sizes) * len(contexts))

    @property
    def note(self) -> str:
        """Which steps are recorded, in words."""
        if not self.are_used:
            return "steps are not recorded"
        return f"at most {self._most_recorded} steps of up to {self._sizes[-1]} tokens"
