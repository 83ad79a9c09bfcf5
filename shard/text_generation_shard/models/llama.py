"""Llama and everything of its shape; what differs comes from `ModelConfig`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from text_generation_shard import kernels
from text_generation_shard.attention.base import AttentionBackend, AttentionPlan
from text_generation_shard.forward import ForwardBatch
from text_generation_shard.layers.attention import Attention
from text_generation_shard.layers.embedding import Embedding, LMHead
from text_generation_shard.layers.mlp import GatedMLP
from text_generation_shard.layers.norm import RMSNorm
from text_generation_shard.layers.rotary import RotaryEmbedding, Rotation
from text_generation_shard.models.compiled import CompiledLayers, Head, compiled_layers
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
    """Token ids to hidden states (`forward`) and hidden states to scores (`logits`)."""

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
            from text_generation_shard.kernels.threads import Threads

            self._measured = Threads().measured
        self._compiled: CompiledLayers | None = None
        parameters.after_load(self._compile)

    def _compile(self) -> None:
        self._compiled = compiled_layers(
            self._blocks,
            Head(self._norm.address, self._head.place, self.config.vocab_size),
            self.config,
            self._backend,
            self._dtype,
            self._quantize,
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The last hidden states [T, hidden_size]; keys and values go into the cache."""
        with self._measured(len(batch.input_ids)):
            hidden, rotation, plan = self._begin(batch)
            delta: Tensor | None = None
            if self._compiled is not None:
                delta = self._compiled(hidden, rotation, plan)
            else:
                for block in self._blocks:
                    delta = block(hidden, delta, rotation, plan)
            if delta is not None:
                self._norm.take_in(hidden, delta, self.config.residual_multiplier)
            return hidden

    def score(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """`forward`, and the `logits` of the tokens that they are wanted of; None: of no token."""
        wanted = batch.logits_indices
        if wanted is None and self._compiled is not None and self._compiled.has_head:
            with self._measured(len(batch.input_ids)):
                hidden, rotation, plan = self._begin(batch)
                return hidden, self._scaled(self._compiled.logits(hidden, rotation, plan).float())
        hidden = self.forward(batch)
        if wanted is None:
            return hidden, self.logits(hidden)
        return hidden, self.logits(hidden[wanted]) if len(wanted) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [S, vocab_size] in float32 for hidden states [S, hidden_size]."""
        return self._scaled(self._head(self._norm.add(hidden, None)))

    def _begin(self, batch: ForwardBatch) -> tuple[Tensor, Rotation, AttentionPlan]:
        """What the layers start with."""
        plan = self._backend.plan(batch)
        end = max(batch.host_context_lens)
        rotation = self.rotary(batch.positions, batch.rope_lens, self._dtype, end)
        hidden = self._embedding(batch.input_ids)
        if self.config.embedding_multiplier != 1.0:
            hidden = hidden * self.config.embedding_multiplier
        return hidden, rotation, plan

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.config.logits_divisor == 1.0 else logits / self.config.logits_divisor
