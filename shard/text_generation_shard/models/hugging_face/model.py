"""A decoder whose modules are transformers' and whose attention, cache and products are ours.

The self-check before serving compares its scores with those of transformers' own attention. It
finds what reading a configuration can not: masks and biases that are not passed to the attention,
layers that can not continue a text, and faults of ours.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from text_generation_shard.device.base import (
    Attention,
    CacheShape,
    ForwardBatch,
    RowState,
)
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.hugging_face.attention import (
    Call,
    Interface,
    LayeredAttention,
    Paged,
    Probe,
    UsualAttention,
    noted_rotations,
)
from text_generation_shard.models.hugging_face.config import ATTENDING, TransformersConfig, refused
from text_generation_shard.models.hugging_face.loading import load
from text_generation_shard.models.hugging_face.states import (
    Part,
    PassStates,
    RowStates,
    parts_of,
)
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)

# Tokens of the checked text; more if a window is not much longer, so that most tokens are behind
# it. Measured: every fault in shard/tests/models/test_model.py is found with these.
_TOKENS, _LONGEST, _SHORTEST = 48, 192, 8
# Largest error of a token's scores, in standard deviations of all scores, and of which share of the
# tokens: rounding can make the others choose another expert. In float32 (True) that is rare. With
# 16 bits, rounding makes errors of 0.02 to 0.22 in tiny random models, and faults above 0.4.
_LIMITS = {True: (1e-3, 0.9), False: (0.25, 0.5)}


class TransformersModel:
    """See `LanguageModel`. Owns the modules, and the attention that they call."""

    # A pass reads the host's values in places.
    is_recordable = False
    # transformers computes positions; kinds that depend on a length are refused.
    length_rule: str | None = None
    recompute_at: int | None = None
    prompt_scaled_at: int | None = None

    def __init__(
        self,
        directory: Path,
        config: TransformersConfig,
        device: Device,
        quantize: str | None,
        world: World,
    ) -> None:
        """ModelError: the checkpoint can not be loaded, or not be served."""
        self.config: TransformersConfig = config
        self.not_native = (
            f"transformers {transformers.__version__} computes this model, because "
            f"{config.reason}; --rope-scaling and CUDA graphs are not supported with it"
        )
        self._interface = Interface()
        self._modules, packing = load(
            directory, config, device, quantize, self._interface.name, world
        )
        # What follows computes passes.
        world.meet()
        self.nbytes, self._split = packing.nbytes, packing.split
        # Stands for the base model while scores are computed.
        base = self._modules.base_model
        self._head = _Head(base)
        self._takes_positions = _first_taken(base, ("position_ids",)) is not None
        # Before transformers 5.24 it had other names.
        self._cache_name = _first_taken(base, ("cache", "past_key_values", "cache_params"))
        self.layers, self._states, size = self._probed(device)
        self.config = replace(config, hidden_size=size)
        self.attention: Attention = self.layers
        self.is_deterministic = packing.is_deterministic
        self.has_windows = any(call.window for call in self.layers.calls.values())

    def _probed(self, device: Device) -> tuple[LayeredAttention, RowStates, int]:
        """The attention that the layers want, the states that they keep, and the features of a
        hidden state. UnsupportedError: not all layers that should attend call the interface."""
        probe, text, states = Probe(), self.config.text, PassStates({}, is_empty=True)
        one = torch.zeros(1, 1, dtype=torch.int64, device=device.torch_device)
        self._modules.set_attn_implementation(self._interface.probing_name)
        with (
            torch.inference_mode(),
            self._refused(),
            noted_rotations(self._modules) as rotations,
        ):
            size = self._run(one, one, probe, states).shape[-1]
        self._modules.set_attn_implementation(self._interface.name)
        kinds = self.config.layer_types or ["attention"] * text.num_hidden_layers
        expected = [layer for layer, kind in enumerate(kinds) if kind in ATTENDING]
        if sorted(probe.calls) != expected:
            raise UnsupportedError(
                f"{len(probe.calls)} layers of {self.config.architecture} attend by transformers' "
                f"attention interface, and {len(expected)} should"
            )
        calls = {layer: probe.calls[layer] for layer in expected}
        # With states, rows of one token are not one sequence: a row would not always have its bits.
        if not states.states:
            self._take_usual(calls, rotations)
        return LayeredAttention(device, calls), RowStates(states.states), size

    @torch.inference_mode()
    def _take_usual(self, calls: Mapping[int, Call], rotations: Mapping[nn.Module, int]) -> None:
        """Give attention modules of the usual form our forward."""
        num_taken = 0
        for module, num_rotated in rotations.items():
            layer: int = module.layer_idx  # type: ignore[assignment]
            call = calls[layer]
            if call.head_dim == call.value_dim == call.size:
                usual = UsualAttention(module, call, self._interface)
                if usual.is_same(num_rotated):
                    module.forward = usual
                    num_taken += 1
        logger.info("the attention of %d of %d layers is one call", num_taken, len(calls))

    def _refused(self) -> AbstractContextManager[None]:
        name = self.config.architecture
        return refused(f"{name} can not be computed with another attention and cache than its own")

    @property
    def cache_shape(self) -> CacheShape:
        """See LanguageModel."""
        return self.layers.cache_shape

    @property
    def widest(self) -> int:
        """See LanguageModel."""
        inner = getattr(self.config.text, "intermediate_size", None) or 0
        inner = max(inner) if isinstance(inner, list | tuple) else inner
        inner = max(inner, 4 * self.config.hidden_size)
        # The residual, its norm and the addend; beside them attention or feed-forward, each twice.
        return 3 * self.config.hidden_size + 2 * max(self.layers.widest, 3 * inner)

    def prepare_recording(self, longest: int) -> None:
        """See Model: nothing is recorded."""

    @property
    def state_bytes(self) -> int:
        """See LanguageModel."""
        return self._states.nbytes

    def make_states(self, num_rows: int, num_snapshots: int) -> None:
        """See LanguageModel."""
        self._states.make(num_rows, num_snapshots)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Model. The last norm is in the result."""
        if batch.states is not None:
            return self._forward_rows(batch, batch.states)
        handler = Paged(self.layers, batch)
        return self._run(batch.input_ids[None], batch.positions[None], handler)[0]

    def _forward_rows(self, batch: ForwardBatch, states: Sequence[RowState]) -> Tensor:
        """Rows of one token together, and the others one by one: states are not ragged."""
        for state in states:
            self._states.begin(state)
        counts = [end - start for start, end in pairwise(batch.cu_seqlens_q)]
        together = [
            row
            for row, count in enumerate(counts)
            if count == 1 and not self._states.is_empty(states[row])
        ]
        groups = [together] if together else []
        groups += [[row] for row in range(len(counts)) if row not in set(together)]
        hidden: Tensor | None = None
        for rows in groups:
            for part in parts_of(batch, rows, [states[row] for row in rows]):
                found = self._forward_part(part)
                if hidden is None:
                    hidden = found.new_empty(len(batch.input_ids), found.shape[1])
                hidden[part.places] = found
        assert hidden is not None, "a pass has rows"
        return hidden

    def _forward_part(self, part: Part) -> Tensor:
        """Hidden states [T, hidden_size] of rows of one token each, or of one row."""
        batch, found = part.batch, self._states.of(part.states)
        shape = (len(part.states), -1)
        handler = Paged(self.layers, batch)
        ids, positions = batch.input_ids.view(shape), batch.positions.view(shape)
        hidden = self._run(ids, positions, handler, found).flatten(0, 1)
        self._states.done(part.states, found)
        for state, end in zip(part.states, batch.host_context_lens, strict=True):
            for position, place in state.stores:
                if position == end:
                    self._states.store(state, place)
        return hidden

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        handler: Probe | Paged,
        states: PassStates | None = None,
    ) -> Tensor:
        """Hidden states [R, T, hidden_size] of token ids [R, T] at these positions."""
        given: dict[str, Any] = {"use_cache": states is not None}
        if self._takes_positions:
            given["position_ids"] = positions
        if states is not None and self._cache_name is not None:
            given[self._cache_name] = states
        with self._interface.handled_by(handler):
            out = self._modules.base_model(input_ids=input_ids, **given)
        found: Tensor = out.last_hidden_state
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model: by the whole model's own forward, with `hidden` in place of its base model's
        output. So every scale and cap of an architecture is in."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        children, name = self._modules._modules, self._modules.base_model_prefix
        base, self._head.hidden = children[name], hidden[None]
        children[name] = self._head
        try:
            out = self._modules(inputs_embeds=self._head.hidden, use_cache=False)
        finally:
            children[name] = base
        logits: Tensor = out.logits[0].float().contiguous()
        return logits

    def normed(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return hidden

    def theirs(self, input_ids: Tensor) -> Tensor:
        """Scores [T, vocab_size] of one text [T], by transformers' own attention, and of modules
        that are not split."""
        self._modules.set_attn_implementation("eager")
        self._split.gathers_all = True
        with self._refused():
            out = self._modules(input_ids=input_ids[None], use_cache=False)
        self._split.gathers_all = False
        self._modules.set_attn_implementation(self._interface.name)
        scores: Tensor = out.logits[0].float()
        return scores


def _first_taken(module: nn.Module, names: Sequence[str]) -> str | None:
    """The first of these arguments that a module's forward takes."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in names if name in taken), None)


class _Head(nn.Module):
    """Stands for a base model: its output is the given hidden states."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        # Not a child: its parameters are not ours.
        self.__dict__["_base"] = base

    @property
    def decoder(self) -> "_Head":
        """Some models call this child of the base model."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def forward(self, *_: Any, **__: Any) -> "_Output":
        """Ignores its arguments."""
        return _Output(self.hidden)


class _Output:
    """A base model's output with hidden states [1, T, hidden_size], and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


@torch.inference_mode()
def check(model: TransformersModel, device: Device) -> None:
    """ModelError, if the scores of a random text in one pass, or in several, differ."""
    windows = [call.window for call in model.layers.calls.values() if call.window]
    count = max([_TOKENS, *(3 * window for window in windows if 3 * window <= _LONGEST)])
    count = min(count, model.config.max_position)
    if count < _SHORTEST:
        raise ModelError(
            f"`max_position_embeddings` of {model.config.architecture} is {count}; expected at "
            f"least {_SHORTEST}"
        )
    here = device.torch_device
    ids = torch.randint(
        model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(0)
    )
    ids = ids.to(here)
    theirs = model.theirs(ids)
    size = model.attention.block_size
    num_blocks = -(-count // size)
    model.attention.allocate(model.cache_shape, num_blocks + device.num_spare_blocks)
    model.make_states(1, 0)
    # Blocks in reverse order, as a cache in use has them in any.
    table = torch.arange(num_blocks, device=here).flip(0)[None]

    def scores(start: int, end: int) -> Tensor:
        positions = torch.arange(start, end, device=here)
        batch = ForwardBatch(
            input_ids=ids[start:end],
            positions=positions,
            rope_lens=None,
            slots=table[0, positions // size] * size + positions % size,
            block_tables=table,
            context_lens=torch.tensor([end], device=here),
            cu_seqlens_q=(0, end - start),
            host_context_lens=(end,),
            logits_indices=None,
            is_decode=end == start + 1,
            states=(RowState(0, is_first=start == 0),) if model.state_bytes else None,
        )
        return model.logits(model.forward(batch))

    ends = [count // 3, count // 2, count // 2 + 1, count // 2 + 2, count]
    parts = [scores(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    scale = theirs.std().clamp(min=1e-6)
    limit, share = _LIMITS[device.dtype is torch.float32]
    errors = [
        float(((found - theirs).abs().amax(dim=1) / scale).quantile(share))
        for found in (scores(0, count), torch.cat(parts))
    ]
    whole, cut = errors
    name = model.config.architecture
    logger.info("self-check of %s: errors of %.1e in one pass, %.1e in several", name, whole, cut)
    if not max(errors) <= limit:
        raise ModelError(
            f"{name} can not be served: its scores differ from those of transformers by "
            f"{whole:.1e} of their deviation in one pass and by {cut:.1e} in several; "
            f"{limit:.1e} is allowed"
        )
