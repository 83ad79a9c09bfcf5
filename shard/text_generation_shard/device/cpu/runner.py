"""Steps on the CPU: a pass is one call of compiled code, if the kernels support the whole model;
the choice of tokens is another.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numba import config as numba_config
from numba import typeof
from torch import Tensor

from text_generation_shard.arrays import Floats, Ints, Upload
from text_generation_shard.device import base
from text_generation_shard.device.base import (
    Angles,
    Decoder,
    DecoderWeights,
    ForwardBatch,
    LayerWeights,
)
from text_generation_shard.device.cpu.attention import PackedAttention, PackedPlan
from text_generation_shard.device.cpu.collectives import SharedMemoryCollectives
from text_generation_shard.device.cpu.kernels import layers
from text_generation_shard.device.cpu.kernels.choice import Choices, choose
from text_generation_shard.device.cpu.kernels.exchange import ARRIVED, FIELDS
from text_generation_shard.device.cpu.kernels.thread_pool import board_words
from text_generation_shard.device.cpu.kernels.vector import (
    INT8,
    aligned,
    marker,
    tensor_address,
    weights_marker,
)
from text_generation_shard.device.cpu.matrices import PackedWeight
from text_generation_shard.device.reference.matrices import FloatTable
from text_generation_shard.device.reference.runner import EagerForward, TorchRunner
from text_generation_shard.sampling import (
    Allowed,
    Choice,
    SamplingTable,
    Scores,
    TokenHistory,
    Watermark,
    favour_green,
)

_NO_MASKS = np.empty((0, 0), np.int32)


def sample(
    logits: Scores,
    table: SamplingTable,
    history: TokenHistory,
    end_ids: Ints,
    watermark: Watermark,
    allowed: Allowed | None = None,
) -> Choice:
    """See `sampling.sample`. The choice in a row is bit for bit independent of the other rows."""
    masks, mask_of = _NO_MASKS, np.full(len(history.rows), -1)
    if allowed is not None:
        masks = allowed.masks().numpy()
        assert len(masks) == len(allowed.places), "masks of another step"
        mask_of[allowed.places] = np.arange(len(masks))
    for place in table.watermarked(history.rows):
        favour_green(torch.as_tensor(logits[place]), watermark, history.previous(place))
    biases, count = table.biases(history.rows, history.is_early), len(history.rows)
    token_ids, logprobs = np.empty(count, np.int64), np.empty(count, np.float32)
    choices = Choices(
        scores=logits if isinstance(logits, np.ndarray) else logits.numpy(),
        rows=history.rows,
        lens=history.lens,
        token_ids=history.token_ids,
        prompt_lens=history.prompt_lens,
        min_new_tokens=history.min_new_tokens,
        sampling=table.rows,
        biased=biases.choices,
        bias_ids=biases.token_ids,
        biases=biases.values,
        end_ids=end_ids,
        masks=masks,
        mask_of=mask_of,
        chosen_ids=token_ids,
        logprobs=logprobs,
    )
    choose(choices)
    # An exception in a kernel's thread would be lost.
    assert min(token_ids.tolist()) >= 0, "the kernel has chosen nothing"
    return Choice(token_ids, logprobs, logits)


def fused_decoder(model: base.Model, dtype: torch.dtype) -> "FusedDecoder | None":
    """A decoder that computes a pass of the model in one call; None if the kernels do not support
    all layers: another architecture, torch's attention, or weights of several kinds."""
    attention = model.attention
    if not isinstance(model, Decoder) or not isinstance(attention, PackedAttention):
        return None
    weights = model.weights()
    world = weights.world
    if world.size > 1 and not isinstance(world.collectives, SharedMemoryCollectives):
        return None
    matrices = [getattr(layer, name) for layer in weights.layers for name in _PRODUCTS]
    if not all(isinstance(matrix, PackedWeight) and not matrix.padding for matrix in matrices):
        return None
    kinds = {type(matrix.weight_kind) for matrix in matrices}
    return FusedDecoder(model, weights, attention, dtype) if len(kinds) == 1 else None


class FusedDecoder:
    """Computes passes of a model, one at a time. Owns the table of weight addresses, the buffers of
    a pass and the board of its threads; the model owns the weights."""

    def __init__(
        self,
        model: Decoder,
        weights: DecoderWeights,
        attention: PackedAttention,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._weights, self._attention = model, weights, attention
        self._dtype = dtype
        # The kernels support an int8 head, or one of the rows' dtype.
        head_kind, own = weights_marker(dtype), weights.head
        self._head = own if isinstance(own, PackedWeight) and not own.padding else None
        if self._head is not None and type(self._head.weight_kind) is type(INT8):
            head_kind = INT8
        table = weights.embedding
        rows = table.weight if isinstance(table, FloatTable) else None
        self._embedding = tensor_address(rows, dtype)
        # Several ranks exchange results within a pass.
        collectives = weights.world.collectives if weights.world.size > 1 else None
        self._ranks = collectives if isinstance(collectives, SharedMemoryCollectives) else None
        # Why waiting for a rank failed in a pass.
        self._status = aligned(1, torch.int64).zero_()
        kind = _packed(weights.layers[0], "qkv").weight_kind
        self._kinds = kind, head_kind, marker(dtype)
        self._layers = np.zeros(len(weights.layers), layers.LAYER)
        for index, layer in enumerate(weights.layers):
            for name, value in _fields(layer, dtype).items():
                self._layers[index][name] = value
        self._board = aligned(board_words(numba_config.NUMBA_NUM_THREADS), torch.int64)
        self._pass = self._constants()
        # Buffers of the largest pass so far, kept so that a step allocates nothing.
        self._memory = np.empty(0, dtype=np.uint8)

    def _constants(self) -> Any:
        """The constants of all passes: [1] of `layers.PASS`."""
        sizes, own, ranks = self._weights.sizes, self._weights.own, self._ranks
        out, down = (_packed(self._weights.layers[0], name) for name in ("out", "down"))
        weight_kind, head_kind, kind = (typeof(kind) for kind in self._kinds)
        codes = layers.codes(weight_kind, head_kind, kind)
        values: dict[str, float] = codes | {
            "hidden_size": sizes.hidden_size,
            "inner_size": own.intermediate_size,
            "num_heads": own.num_heads,
            "num_kv_heads": own.num_kv_heads,
            "head_dim": sizes.head_dim,
            "half": self._model.angle_table(1).shape[2],
            "out_parts": out.num_parts,
            "down_parts": down.num_parts,
            "board": tensor_address(self._board),
            "embedding": 0 if ranks is not None else self._embedding,
            "head": 0 if self._head is None else self._head.address,
            "head_scales": 0 if self._head is None else self._head.beside_address,
            "final_norm": tensor_address(self._weights.norm, torch.float32),
            "vocab_size": own.num_tokens,
            "status": tensor_address(self._status),
            "embedding_multiplier": sizes.embedding_multiplier,
            "attention_scale": sizes.attention_scale,
            "eps": sizes.norm_eps,
            "multiplier": sizes.residual_multiplier,
        }
        if ranks is not None:
            values |= {name: int(ranks.exchange[0][name]) for name in FIELDS} | {
                "first_token": own.first_token,
                "vectors": self._embedding,
                "row_itemsize": self._dtype.itemsize,
            }
        constants = np.zeros(1, layers.PASS)
        for name, value in values.items():
            constants[name] = value
        return constants

    @property
    def is_whole(self) -> bool:
        """Whether `decode_scores` can be called: the same call computes the head, and one table
        has all angles."""
        return self._head is not None and self._model.length_rule is None

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """See Forward."""
        ids = batch.input_ids
        hidden = self._embedded(ids)
        if hidden is None:
            # Uninitialized: the kernels look up the embeddings.
            hidden = torch.empty(len(ids), self._weights.sizes.hidden_size, dtype=self._dtype)
        angles = self._model.angles(batch)
        plan = self._attention.plan(replace(batch, logits_indices=None), angles)
        self._compute(ids.numpy(), plan, hidden, _NO_LOGITS)
        return hidden

    def scores(self, batch: ForwardBatch) -> Tensor:
        """See Forward. For tokens without logits, the last layer computes only keys and values."""
        if self._head is None:
            hidden, wanted = self.hidden(batch), batch.logits_indices
            return self._model.logits(hidden if wanted is None else hidden[wanted])
        plan = self._attention.plan(batch, self._model.angles(batch))
        return torch.from_numpy(self._logits(batch.input_ids.numpy(), plan))

    def decode_scores(self, rows: base.Rows, scheduled: base.ScheduledTokens) -> Floats:
        """`scores` of a decode pass, if `is_whole`. Avoids torch's operators, which are slow
        between steps, when their code is in no cache."""
        end = max(scheduled.ends.tolist())
        # Positions are `starts`, a numpy array.
        angles = Angles(self._model.angle_table(end), scheduled.starts)  # type: ignore[arg-type]
        return self._logits(*self._attention.plan_rows(rows, scheduled, angles))

    def _logits(self, ids: Ints, plan: PackedPlan) -> Floats:
        own = self._weights.sizes
        logits: Floats = np.empty((len(plan.wanted), own.vocab_size), dtype=np.float32)
        self._compute(ids, plan, self._embedded(ids), logits)
        if own.logits_divisor != 1.0:
            logits /= np.float32(own.logits_divisor)
        return logits

    def _embedded(self, ids: Tensor | Ints) -> Tensor | None:
        """The input [T, hidden_size] of the first layer; None: the kernels look up the
        embeddings."""
        if self._embedding:
            return None
        own, rows = self._weights.own, torch.as_tensor(ids)
        if self._ranks is not None:
            # The vectors of other ranks' tokens are overwritten later.
            rows = (rows - own.first_token).clamp_(0, own.num_tokens - 1)
        hidden = self._weights.embedding.lookup(rows)
        multiplier = self._weights.sizes.embedding_multiplier
        return hidden if multiplier == 1.0 else hidden * multiplier

    def _compute(self, ids: Ints, plan: PackedPlan, hidden: Tensor | None, logits: Any) -> None:
        """Compute all layers of a pass. hidden [T, hidden_size] is overwritten; None: not needed.
        Writes logits [S, vocab_size], if not empty."""
        cache, (table, rows) = self._attention.cache, plan.angles
        assert cache is not None
        given = layers.Given(
            *self._kinds,
            self._pass,
            self._layers,
            tensor_address(hidden, self._dtype),
            tensor_address(table, torch.float32),
            cache.address,
            cache.layer_bytes,
            cache.num_blocks,
            ids,
            rows.numpy() if isinstance(rows, Tensor) else rows,
            plan.slots,
            plan.block_tables,
            plan.tasks,
            plan.wanted,
            plan.last_tasks,
            logits,
        )
        if self._ranks is not None:
            sizes = len(ids), len(plan.wanted), len(logits), len(self._layers)
            count = layers.num_operations(self._pass[0], *sizes)
            self._pass["num_words"], self._pass["word"] = count, self._ranks.reserve(count)
            self._pass["deadline_ns"] = self._ranks.exchange[0]["deadline_ns"]
            self._status[0] = ARRIVED
        needed = layers.run_layers(given, self._memory, plan.num_threads)
        if needed > len(self._memory):
            self._memory = np.empty(0, dtype=np.uint8)
            self._memory = np.empty(needed, dtype=np.uint8)
            layers.run_layers(given, self._memory, plan.num_threads)
        if self._ranks is not None:
            # RankError, if the pass is not complete.
            self._ranks.check(int(self._status[0]))


class CpuRunner(TorchRunner):
    """Computes a pass by the fused decoder, if there is one."""

    def __init__(self, model: base.Model, decoder: FusedDecoder | None, upload: Upload) -> None:
        super().__init__(decoder or EagerForward(model), upload, model.length_rule)
        self._decoder = decoder if decoder is not None and decoder.is_whole else None

    def scores(self, rows: base.Rows, scheduled: base.ScheduledTokens, is_kept: bool) -> Scores:
        """See Runner."""
        if self._decoder is not None and scheduled.is_decode:
            return self._decoder.decode_scores(rows, scheduled)
        return super().scores(rows, scheduled, is_kept)

    def choose(self, scores: Scores, given: base.ChoiceInputs) -> base.Launched:
        """See Runner."""
        done = time.perf_counter_ns()
        if isinstance(scores, np.ndarray):
            # A numpy array needs no torch operators, which are slow here: see `decode_scores`.
            return base.StepScores(sample(scores, *given), done)
        with torch.inference_mode():
            return base.StepScores(sample(scores, *given), done)


_PRODUCTS = "qkv", "out", "gate_up", "down"
_NORMS = "attention_norm", "query_norm", "key_norm", "mlp_norm"
_BIASES = "qkv_bias", "out_bias", "down_bias"
_NO_LOGITS = np.empty((0, 0), dtype=np.float32)


def _packed(layer: LayerWeights, name: str) -> PackedWeight:
    matrix: PackedWeight = getattr(layer, name)
    return matrix


def _fields(layer: LayerWeights, dtype: torch.dtype) -> dict[str, int]:
    """The fields of a layer in `layers.LAYER`."""
    found = {name: tensor_address(getattr(layer, name), torch.float32) for name in _NORMS}
    found |= {name: tensor_address(getattr(layer, name), dtype) for name in _BIASES}
    for name in _PRODUCTS:
        matrix = _packed(layer, name)
        found |= {name: matrix.address, f"{name}_scales": matrix.beside_address}
    return found | {"is_rotated": int(layer.uses_rope), "window": layer.window or 0}
