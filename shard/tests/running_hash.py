"""A model with a state per row: Llama whose hidden states also depend on a hash of all tokens of
their row, so that a wrong state changes tokens."""

from itertools import pairwise
from typing import Any

import torch
from text_generation_shard.device.base import ForwardBatch, RowState
from text_generation_shard.engine.engine import Engine
from torch import Tensor

_NUM_HASHES = 61


class RunningHash:
    """Wraps a loaded model. The state of a row is the hash of its tokens so far."""

    state_bytes = 8
    is_recordable = False
    states: list[int]
    snapshots: list[int | None]

    def __init__(self, model: Any) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(1)
        size = _NUM_HASHES, model.config.hidden_size
        self._vectors = 3 * torch.randn(size, generator=generator)

    def __getattr__(self, name: str) -> Any:
        if name == "weights":  # it is not computed as one program
            raise AttributeError
        return getattr(self._model, name)

    def make_states(self, num_rows: int, num_snapshots: int) -> None:
        # Not the empty state, which is 0: what is left in a row must not matter.
        self.states = [7] * num_rows
        self.snapshots = [None] * num_snapshots

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = self._model.forward(batch)
        assert batch.states is not None
        spans = list(pairwise(batch.cu_seqlens_q))
        for state, span, end in zip(batch.states, spans, batch.host_context_lens, strict=True):
            ids = batch.input_ids[slice(*span)].tolist()
            hashes = self._advance(state, ids, end - len(ids))
            hidden[slice(*span)] += self._vectors[torch.tensor(hashes)].to(hidden.dtype)
        return hidden

    def _advance(self, state: RowState, ids: list[int], start: int) -> list[int]:
        """The hash after each token."""
        found, hashes = self.states[state.row], []
        if state.is_first:
            begun = 0 if state.snapshot is None else self.snapshots[state.snapshot]
            assert begun is not None, "nothing is stored there"
            found = begun
        stores = dict(state.stores)
        for position, token_id in enumerate(ids, start + 1):
            found = (found * 31 + token_id + 1) % _NUM_HASHES
            hashes.append(found)
            if (place := stores.pop(position, None)) is not None:
                self.snapshots[place] = found
        assert not stores, "it is stored in another pass"
        self.states[state.row] = found
        return hashes


def with_states(engine: Engine) -> Engine:
    """The engine of such a model, which is not warm yet."""
    model: Any = RunningHash(engine.model)
    return Engine(engine.device, model, engine.weights_bytes, engine._watermark)
