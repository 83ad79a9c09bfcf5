"""The recurrent states of rows, for layers that keep one beside the KV cache.

transformers' modules call the methods of `PassStates` in place of those of its own cache. In a pass
each layer reads the state of each row once, and writes the next one.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from text_generation_shard.device.base import ForwardBatch, RowState


class Key(NamedTuple):
    """One of the tensors of a row's state."""

    kind: str
    layer: int
    number: int


class PassStates:
    """See transformers' `Cache`: the states of the R rows of a pass, which have all seen tokens or
    all seen none."""

    def __init__(self, states: dict[Key, Tensor], is_empty: bool) -> None:
        """states: [R, …] each; they are overwritten."""
        self.states, self._is_empty = states, is_empty

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values are stored by the attention."""
        return key, value

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Positions are given, so that nothing is computed from it."""
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """For masks, which only the probe has made."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """See get_query_offset."""
        return query_length, 0

    def is_recording_past(self, *_: Any) -> bool:
        """States of earlier tokens are not kept."""
        return False

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether the rows have seen tokens."""
        return not self._is_empty

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution."""
        return self._found(Key("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a recurrence has made of all tokens."""
        return self._found(Key("recurrent", layer_idx, state_idx))

    def _found(self, key: Key) -> Tensor | None:
        return None if self._is_empty else self.states[key]

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep the last inputs; returns the previous ones with the new ones [R, size, T]."""
        key = Key("conv", layer_idx, state_idx)
        size = conv_kernel_size or conv_states.shape[-1]
        previous = self._found(key)
        if previous is not None:
            inputs = torch.cat((previous, conv_states), dim=-1)
        else:
            inputs = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self._keep(key, inputs[..., -size:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep a state."""
        self._keep(Key("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def _keep(self, key: Key, state: Tensor) -> None:
        if key in self.states:
            self.states[key].copy_(state)
        else:
            self.states[key] = state.clone()


class Part(NamedTuple):
    """Rows of a pass whose states are computed together: rows of one token, or one row."""

    batch: ForwardBatch
    states: list[RowState]
    # [T] indices of their tokens in the whole pass.
    places: Tensor


def parts_of(
    batch: ForwardBatch, rows: Sequence[int], states: Sequence[RowState]
) -> Iterator[Part]:
    """The parts of these rows of a pass, in order. One row is cut where its state is stored."""
    start, end = batch.cu_seqlens_q[rows[0]], batch.cu_seqlens_q[rows[0] + 1]
    contexts = [batch.host_context_lens[row] for row in rows]
    # Per part: its tokens in the whole pass, and the contexts of its rows.
    parts: list[tuple[Sequence[int], list[int]]]
    if len(rows) > 1:
        parts = [([batch.cu_seqlens_q[row] for row in rows], contexts)]
    else:
        first = end - contexts[0]
        cuts = [first + position for position, _ in states[0].stores]
        bounds = pairwise([start, *(cut for cut in cuts if cut < end), end])
        parts = [(range(begin, stop), [stop - first]) for begin, stop in bounds]
    which = torch.tensor(list(rows), device=batch.slots.device)
    for tokens, lens in parts:
        places = torch.tensor(list(tokens), device=batch.slots.device)
        tokens_per_row = len(places) // len(rows)
        own = ForwardBatch(
            input_ids=batch.input_ids[places],
            positions=batch.positions[places],
            rope_lens=None,
            slots=batch.slots[places],
            block_tables=batch.block_tables[which],
            context_lens=batch.context_lens.new_tensor(lens),
            cu_seqlens_q=tuple(range(0, len(places) + 1, tokens_per_row)),
            host_context_lens=tuple(lens),
            logits_indices=None,
            is_decode=tokens_per_row == 1,
        )
        yield Part(own, list(states), places)


class RowStates:
    """Owns the states of all rows, and the snapshots."""

    def __init__(self, examples: dict[Key, Tensor]) -> None:
        """examples: the state [1, …] of a row."""
        self._examples = {key: torch.empty_like(one) for key, one in examples.items()}
        self.make(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of a row's state; 0: there are no states."""
        return sum(one.nbytes for one in self._examples.values())

    def make(self, num_rows: int, num_snapshots: int) -> None:
        """See LanguageModel.make_states."""
        self._num_rows, count = num_rows, num_rows + num_snapshots
        self._pool: dict[Key, Tensor] = {}
        self._pool = {
            key: one.new_zeros(count, *one.shape[1:]) for key, one in self._examples.items()
        }
        # Whether the state of a row or snapshot is that of no token.
        self._is_empty = [True] * count

    def begin(self, state: RowState) -> None:
        """If it is the first pass of a request, put its row into the state that it begins with."""
        if state.is_first and state.snapshot is not None:
            self._copy(self._num_rows + state.snapshot, state.row)
        elif state.is_first:
            self._is_empty[state.row] = True

    def is_empty(self, state: RowState) -> bool:
        """Whether the row has seen no token."""
        return self._is_empty[state.row]

    def of(self, states: Sequence[RowState]) -> PassStates:
        """The states of these rows, for a pass; `done` ends it."""
        rows = [state.row for state in states]
        is_empty = self._is_empty[rows[0]]
        if len(rows) == 1:
            # In place: a view.
            found = {key: pool[rows[0] : rows[0] + 1] for key, pool in self._pool.items()}
        else:
            found = {key: pool[rows] for key, pool in self._pool.items()}
        return PassStates(found, is_empty)

    def done(self, states: Sequence[RowState], found: PassStates) -> None:
        """Keep what a pass has made of the states of these rows."""
        rows = [state.row for state in states]
        for row in rows:
            self._is_empty[row] = False
        if len(rows) > 1:
            for key, pool in self._pool.items():
                pool[rows] = found.states[key]

    def store(self, state: RowState, place: int) -> None:
        """Keep a row's present state as a snapshot."""
        self._copy(state.row, self._num_rows + place)

    def _copy(self, source: int, target: int) -> None:
        for pool in self._pool.values():
            pool[target].copy_(pool[source])
        self._is_empty[target] = self._is_empty[source]
