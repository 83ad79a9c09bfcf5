"""Llama and all families of its shape; their differences come from `LlamaConfig`."""

import torch
from torch import Tensor

from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.partition import Partition, partition_of
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device.decoder import DecoderWeights, LayerWeights, RankSizes
from text_generation_shard.device.forward import (
    Attention,
    AttentionPlan,
    CacheShape,
    ForwardBatch,
)
from text_generation_shard.layers.attention import SelfAttention
from text_generation_shard.layers.embedding import Embedding, LMHead
from text_generation_shard.layers.linear import RMSNorm
from text_generation_shard.layers.mlp import GatedMLP
from text_generation_shard.layers.rotary import RotaryEmbedding
from text_generation_shard.parallel import World


class Block:
    """Attention and feed-forward, each with a norm before it and a residual."""

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        config: LlamaConfig,
        own: Partition,
        layer: int,
        attention: Attention,
    ) -> None:
        prefix = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.norm_eps
        self._attention = SelfAttention(
            *(parameters, world, config, own), f"{prefix}.self_attn", layer, attention
        )
        self._mlp = GatedMLP(
            *(parameters, world, config, own.inner, own.inner_part), f"{prefix}.mlp"
        )
        self._attention_norm = RMSNorm(parameters, f"{prefix}.input_layernorm", size, eps)
        self._mlp_norm = RMSNorm(parameters, f"{prefix}.post_attention_layernorm", size, eps)
        self._multiplier = config.residual_multiplier

    def __call__(self, hidden: Tensor, delta: Tensor | None, plan: AttentionPlan) -> Tensor:
        """Add the previous block's delta and this block's attention to hidden [T, hidden_size], in
        place; returns the feed-forward's output as the next delta."""
        normed = self._attention_norm.add(hidden, delta, self._multiplier)
        attended = self._attention(normed, plan)
        normed = self._mlp_norm.add(hidden, attended, self._multiplier)
        return self._mlp(normed)

    def weights(self) -> LayerWeights:
        """For devices that compute all layers as one program."""
        attention, mlp = self._attention, self._mlp
        query_norm, key_norm = (
            None if norm is None else norm.weight
            for norm in (attention.query_norm, attention.key_norm)
        )
        return LayerWeights(
            self._attention_norm.weight,
            *(attention.qkv.matrix, attention.qkv.bias),
            *(query_norm, key_norm),
            *(attention.out.matrix, attention.out.bias),
            self._mlp_norm.weight,
            mlp.gate_up.matrix,
            *(mlp.down.matrix, mlp.down.bias),
            *(attention.uses_rope, attention.window),
        )


class LlamaModel:
    """Token ids to hidden states (`forward`), and these to scores (`logits`); see
    `LanguageModel`."""

    is_deterministic = True
    not_native = ""
    state_bytes = 0

    def __init__(self, parameters: Parameters, world: World, config: LlamaConfig) -> None:
        """ModelError if the model can not be split among the ranks."""
        self.config = config
        device, quantize = parameters.device, parameters.quantize
        self._device, self._world = device, world
        self.partition = own = partition_of(
            *(config, world.rank, world.size, quantize),
            lambda shape, asked: device.quantized_form(shape, asked).kind,
            fills_up=device.sums_in_parts,
        )
        """This rank's part of the model."""
        self.attention = device.attention(
            *(own.heads.count, own.kv_heads.count, config.head_dim), config.attention_scale
        )
        self._embedding = Embedding(
            *(parameters, world, "model.embed_tokens"), own.vocabulary, config.hidden_size
        )
        self._blocks = [
            Block(parameters, world, config, own, layer, self.attention)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(parameters, "model.norm", config.hidden_size, config.norm_eps)
        self._head = LMHead(
            *(parameters, world, "lm_head"), self._embedding, config.tie_word_embeddings
        )
        self.rotary = RotaryEmbedding(config.rope, device.torch_device)
        self.angles, self.angle_table = self.rotary.angles, self.rotary.table

    @property
    def cache_shape(self) -> CacheShape:
        """See LanguageModel."""
        num_kv_heads, dtype = self.partition.kv_heads.count, self._device.cache_dtype
        sizes = self.config.num_layers, num_kv_heads, self.config.head_dim
        return CacheShape(*sizes, self.attention.block_size, dtype)

    @property
    def widest(self) -> int:
        """See LanguageModel."""
        config = self.config
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        # The residual, its norm and the addend; beside them attention or feed-forward.
        return 3 * config.hidden_size + max(heads, 3 * config.intermediate_size)

    @property
    def has_windows(self) -> bool:
        """See LanguageModel."""
        return any(self.config.layer_windows)

    @property
    def length_rule(self) -> str | None:
        """See RotaryEmbedding."""
        return self.rotary.length_rule

    @property
    def recompute_at(self) -> int | None:
        """See LanguageModel."""
        return self.rotary.recompute_at

    @property
    def prompt_scaled_at(self) -> int | None:
        """See LanguageModel."""
        return self.rotary.prompt_scaled_at

    @property
    def is_recordable(self) -> bool:
        """See Model: recorded passes read all angles from one table."""
        return self.length_rule is None

    def prepare_recording(self, longest: int) -> None:
        """See Model."""
        self.angle_table(longest)

    def make_states(self, num_rows: int, num_snapshots: int) -> None:
        """See LanguageModel: it keeps none."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Model."""
        config = self.config
        hidden = self._embedding(batch.input_ids)
        if config.embedding_multiplier != 1.0:
            hidden = hidden * config.embedding_multiplier
        plan = self.attention.plan(batch, self.angles(batch))
        delta: Tensor | None = None
        for block in self._blocks:
            delta = block(hidden, delta, plan)
        if delta is not None:
            # The same rounding as between two blocks; the returned norm is unused.
            self._norm.add(hidden, delta, config.residual_multiplier)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        logits, divisor = self._head(self.normed(hidden)), self.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor

    def normed(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return self._norm.add(hidden, None)

    def weights(self) -> DecoderWeights:
        """See Decoder."""
        layers = [block.weights() for block in self._blocks]
        shares = self.partition
        own = RankSizes(
            *(shares.heads.count, shares.kv_heads.count, shares.inner.count),
            *(shares.vocabulary.start, shares.vocabulary.count),
        )
        matrices = self._embedding.table, layers, self._norm.weight, self._head.matrix
        return DecoderWeights(self.config, own, self._world, *matrices)
