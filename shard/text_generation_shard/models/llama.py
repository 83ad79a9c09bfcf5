"""Llama and everything of its shape; what differs comes from `ModelConfig`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from text_generation_shard.arrays import Floats
from text_generation_shard.device.attention import AttentionBackend, AttentionPlan
from text_generation_shard.device.batch import ForwardBatch, RowBatch
from text_generation_shard.device.cpu import kernels
from text_generation_shard.device.cpu.runner import CompiledLayers, Ends, Tokens, compiled_layers
from text_generation_shard.layers.attention import Attention
from text_generation_shard.layers.embedding import Embedding, LMHead
from text_generation_shard.layers.mlp import GatedMLP
from text_generation_shard.layers.norm import RMSNorm
from text_generation_shard.layers.rotary import KernelRotation, RotaryEmbedding, Rotation
from text_generation_shard.models.config import ModelConfig
from text_generation_shard.weights import Parameters


class Block:
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(
        self, parameters: Parameters, config: ModelConfig, layer: int, backend: AttentionBackend
    ) -> None:
        prefix = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.norm_eps
        self._attention = Attention(parameters, config, f"{prefix}.self_attn", layer, backend)
        self._mlp = GatedMLP(parameters, config, f"{prefix}.mlp")
        self._attention_norm = RMSNorm(parameters, f"{prefix}.input_layernorm", size, eps)
        self._mlp_norm = RMSNorm(parameters, f"{prefix}.post_attention_layernorm", size, eps)
        self._multiplier = config.residual_multiplier

    def fields(self, kind: Any) -> dict[str, int] | None:
        """See Linear.fields."""
        attention, mlp = self._attention.fields(kind), self._mlp.fields(kind)
        if attention is None or mlp is None:
            return None
        norms = self._attention_norm.address, self._mlp_norm.address
        return attention | mlp | dict(zip(("attention_norm", "mlp_norm"), norms, strict=True))

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        """hidden [T, hidden_size] takes in what the block before left, and this one's attention, in
        place; returns what its feed-forward adds, for the next block to take in."""
        normed = self._attention_norm.add(hidden, delta, self._multiplier)
        attended = self._attention(normed, rotation, plan)
        normed = self._mlp_norm.add(hidden, attended, self._multiplier)
        return self._mlp(normed)


def _unmeasured(tokens: int) -> AbstractContextManager[None]:
    return nullcontext()


class LlamaModel:
    """Token ids to hidden states (`forward`), these to scores (`logits`), or both (`score`)."""

    def __init__(
        self, parameters: Parameters, config: ModelConfig, backend: AttentionBackend
    ) -> None:
        self.config = config
        self._backend = backend
        self._dtype, self._quantize = parameters.dtype, parameters.quantize
        self._embedding = Embedding(
            parameters, "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self._blocks = [
            Block(parameters, config, layer, backend) for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(parameters, "model.norm", config.hidden_size, config.norm_eps)
        self._head = LMHead(parameters, "lm_head", self._embedding, config.tie_word_embeddings)
        self.rotary = RotaryEmbedding(config.rope, parameters.device)
        self._measured: Callable[[int], AbstractContextManager[None]] = _unmeasured
        if kernels.are_used(parameters.dtype, parameters.device):
            from text_generation_shard.device.cpu.kernels.threads import Threads

            self._measured = Threads().measured
        self._compiled: CompiledLayers | None = None
        parameters.after_load(self._compile)

    def _compile(self) -> None:
        self._compiled = compiled_layers(
            self._blocks,
            Ends(self._embedding.address, self._norm.address, self._head.place),
            self.config,
            self._backend,
            self._dtype,
            self._quantize,
        )

    @property
    def weight_regions(self) -> list[tuple[int, int]]:
        """Addresses and bytes of the weights that every pass reads, where kernels read them."""
        return [] if self._compiled is None else self._compiled.regions

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The last hidden states [T, hidden_size]; keys and values go into the cache."""
        if batch.logits_indices is not None:
            batch = replace(batch, logits_indices=None)
        with self._measured(len(batch.input_ids)):
            hidden = self._embed(batch.input_ids)
            self._compute(batch, hidden)
            return hidden

    def score(self, batch: ForwardBatch) -> Tensor:
        """`forward`, and the `logits` of the tokens that the batch wants them of [S, vocab_size].

        What the last layer makes of the others is computed only where the kernels do not run.
        """
        compiled, wanted = self._compiled, batch.logits_indices
        with self._measured(len(batch.input_ids)):
            if compiled is not None and compiled.has_head:
                hidden = None if compiled.has_embedding else self._embed(batch.input_ids)
                logits = torch.from_numpy(compiled.logits(self._tokens(batch), hidden))
                divisor = self.config.logits_divisor
                return logits if divisor == 1.0 else logits.div_(divisor)
            hidden = self._embed(batch.input_ids)
            self._compute(batch, hidden)
        return self.logits(hidden if wanted is None else hidden[wanted])

    def _compute(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """hidden [T, hidden_size] goes through all layers in place."""
        if self._compiled is not None:
            self._compiled.forward(self._tokens(batch), hidden)
            return
        plan, rotation = self._backend.plan(batch), self._rotation(batch)
        delta: Tensor | None = None
        for block in self._blocks:
            delta = block(hidden, delta, rotation, plan)
        if delta is not None:
            self._norm.take_in(hidden, delta, self.config.residual_multiplier)

    def _tokens(self, batch: ForwardBatch) -> Tokens:
        rotation = self._rotation(batch)
        assert isinstance(rotation, KernelRotation)
        where = rotation.angles, rotation.positions.numpy(), self._backend.plan(batch)
        return Tokens(batch.input_ids.numpy(), *where)

    def _rotation(self, batch: ForwardBatch) -> Rotation:
        end = max(batch.host_context_lens)
        return self.rotary(batch.positions, batch.rope_lens, self._dtype, end)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """What the layers start with [T, hidden_size]; anything if they have the embedding."""
        if self._compiled is not None and self._compiled.has_embedding:
            return torch.empty(len(input_ids), self.config.hidden_size, dtype=self._dtype)
        hidden = self._embedding(input_ids)
        if self.config.embedding_multiplier != 1.0:
            hidden = hidden * self.config.embedding_multiplier
        return hidden

    @property
    def scores_rows(self) -> bool:
        """Whether there is a short way, `score_rows`, for one token of each row."""
        has_head = self._compiled is not None and self._compiled.has_head
        return has_head and self.rotary.length_rule is None

    def score_rows(self, batch: RowBatch) -> Floats:
        """`forward`, and the `logits` of all tokens, on the host."""
        compiled = self._compiled
        assert compiled is not None
        with self._measured(len(batch.rows)):
            angles = self.rotary.table(max(batch.starts.tolist()) + 1)
            tokens = compiled.plan_rows(batch, angles)
            hidden = None
            if not compiled.has_embedding:
                hidden = self._embed(torch.from_numpy(tokens.input_ids))
            logits = compiled.logits(tokens, hidden)
            if self.config.logits_divisor != 1.0:
                logits /= np.float32(self.config.logits_divisor)
            return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [S, vocab_size] in float32 for hidden states [S, hidden_size]."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        logits, divisor = self._head(self._norm.add(hidden, None)), self.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor
