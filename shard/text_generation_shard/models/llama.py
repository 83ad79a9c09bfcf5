"""Llama and all families of its shape; their differences come from `LlamaConfig`."""

import torch
from torch import Tensor

from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.partition import Partition, Share, partition_of, whole
from text_generation_shard.checkpoint.rope import RotaryEmbedding
from text_generation_shard.checkpoint.weights import Parameters, Sections
from text_generation_shard.device.base import (
    ALL,
    Activation,
    Attention,
    AttentionPlan,
    CacheShape,
    DecoderWeights,
    EmbeddingTable,
    ForwardBatch,
    LayerWeights,
    Matrix,
    RankSizes,
)
from text_generation_shard.parallel import World


class RMSNorm:
    """x / rms(x) · weight over the last dimension; the mean is taken in float32."""

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self._device, self._eps = parameters.device, eps
        self._size = size
        self.weight = parameters.add_vector({f"{name}.weight": [whole(size)]})
        """[size], float32 after loading."""
        parameters.after_load(self._widen)

    def _widen(self) -> None:
        self.weight = self.weight.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., size] → the same shape and dtype."""
        # `reshape` would return a view with gaps between rows, if there is one head.
        rows = hidden.contiguous().view(-1, self._size)
        return self._device.add_norm(rows, None, 1.0, self.weight, self._eps).view(hidden.shape)

    def add(self, hidden: Tensor, delta: Tensor | None, multiplier: float = 1.0) -> Tensor:
        """hidden [T, size] += delta * multiplier, in place; returns the norm of the result."""
        return self._device.add_norm(hidden, delta, multiplier, self.weight, self._eps)


# Forms with a scale per row; a part of a row uses the scale of the whole row.
_SCALED_BY_ROW = frozenset({"int8", "fp8"})


class Linear:
    """y = x Wᵀ + b, where W stacks the outputs of several named projections.

    One product over stacked weights (q, k and v; gate and up) reads the input once. Each rank has a
    part of the outputs or of the inputs. With a part of the inputs, the results of all ranks are
    summed, and then the whole bias is added.
    """

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        outputs: Sections,
        inputs: Share,
        bias: bool = False,
        part: int | None = None,
        gate: Activation | None = None,
    ) -> None:
        """outputs: by name in the checkpoint. part: each rank has a part of the inputs, in fixed
        parts of this size, see Partition; None: each rank has all inputs. `gate`: applied to the
        first half of the outputs, which is multiplied with the second half."""
        self.matrix: Matrix
        """Set when it is loaded."""
        self._world, self._device, self._gate = world, parameters.device, gate
        self._is_summed, self._part = part is not None and world.size > 1, part
        self.bias: Tensor | None = None
        if bias:
            named = {f"{name}.bias": shares for name, shares in outputs.items()}
            self.bias = parameters.add_vector(named)
        # A part has the form of the whole matrix.
        rows = sum(share.total for shares in outputs.values() for share in shares)
        form = self._device.quantized_form((rows, inputs.total), parameters.quantize)
        self._quantize, self._columns = form.kind, ALL
        if self._is_summed and form.kind in _SCALED_BY_ROW:
            self._columns = slice(inputs.start, inputs.start + inputs.count)
        named = {f"{name}.weight": shares for name, shares in outputs.items()}
        reads_whole_rows = self._columns is not ALL
        parameters.add_matrix(named, inputs, self._receive, reads_whole_rows, form.obstacle)

    def _receive(self, weight: Tensor) -> Matrix:
        if self._gate is None:
            self.matrix = self._device.matrix(weight, self._quantize, self._columns, self._part)
        else:
            has_bias = self.bias is not None
            self.matrix = self._device.gated_matrix(weight, self._quantize, self._gate, has_bias)
        return self.matrix

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, in_features] → [T, sum of outputs], or half of them behind a gate."""
        if not self._is_summed:
            return self.matrix(hidden, self.bias)
        out = self._world.all_reduce(self.matrix(hidden))
        return out if self.bias is None else out.add_(self.bias)


class TokenWeights:
    """Token ids to vectors, and hidden states to scores; with tied weights, by one matrix.

    Each rank has a part of the tokens: their vectors and scores.
    """

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        own: Share,
        hidden_size: int,
        tie_word_embeddings: bool,
    ) -> None:
        """own: this rank's tokens."""
        self.table: EmbeddingTable
        """This rank's vectors; set when they are loaded."""
        self.head: Matrix
        """The weights of this rank's scores; set when they are loaded."""
        self._parameters, self._world, self._own = parameters, world, own
        self._is_tied, inputs, name = tie_word_embeddings, whole(hidden_size), "lm_head.weight"
        table = "model.embed_tokens.weight"
        parameters.add_matrix({table: [own]}, inputs, self._receive_table)
        if tie_word_embeddings:
            # Some checkpoints also store the tied head, as a copy.
            parameters.ignore(name)
        else:
            parameters.add_matrix({name: [own]}, inputs, self._receive_head)

    def _receive_table(self, weight: Tensor) -> EmbeddingTable:
        parameters = self._parameters
        self.table = parameters.device.embedding(weight, parameters.quantize)
        if self._is_tied:
            self.head, nbytes = self.table.as_matrix()
            parameters.nbytes += nbytes
        return self.table

    def _receive_head(self, weight: Tensor) -> Matrix:
        # int8 at least: the error of int4 would go directly into the scores.
        quantize = "int8" if self._parameters.quantize is not None else None
        self.head = self._parameters.device.matrix(weight, quantize)
        return self.head

    def vectors(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] → [T, hidden_size]."""
        if self._world.size == 1:
            return self.table.lookup(input_ids)
        own = input_ids - self._own.start
        is_elsewhere = (own < 0) | (own >= self._own.count)
        vectors = self.table.lookup(torch.where(is_elsewhere, 0, own))
        # One rank has the vector, and the sum with zeros is exact.
        return self._world.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] → logits [S, vocab_size] in float32."""
        if self._world.size == 1:
            return self.head(hidden).float()
        scores = self._world.all_gather(self.head(hidden))
        return scores[:, : self._own.total].float().contiguous()


class Block:
    """Attention and a gated feed-forward, each with a norm before it and a residual.

    Ranks share the heads and the inner features.
    """

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        config: LlamaConfig,
        own: Partition,
        layer: int,
        attention: Attention,
    ) -> None:
        self._config, self._own, self._layer, self._attend = config, own, layer, attention
        self._window, self._uses_rope = config.layer_windows[layer], config.layer_uses_rope[layer]
        prefix = f"model.layers.{layer}"
        hidden, inner, head_dim = whole(config.hidden_size), own.inner, config.head_dim
        query, kv = own.heads.times(head_dim), own.kv_heads.times(head_dim)
        heads: Sections = {"q_proj": [query], "k_proj": [kv], "v_proj": [kv]}
        gated: Sections = {"gate_proj": [inner], "up_proj": [inner]}
        if config.fused_projections:
            heads, gated = {"qkv_proj": [query, kv, kv]}, {"gate_up_proj": [inner, inner]}

        def linear(
            place: str,
            outputs: Sections,
            inputs: Share,
            bias: bool,
            part: int | None = None,
            gate: Activation | None = None,
        ) -> Linear:
            named = {f"{prefix}.{place}.{name}": shares for name, shares in outputs.items()}
            return Linear(parameters, world, named, inputs, bias, part, gate)

        def norm(name: str, size: int = config.hidden_size) -> RMSNorm:
            return RMSNorm(parameters, f"{prefix}.{name}", size, config.norm_eps)

        self._qkv = linear("self_attn", heads, hidden, config.qkv_bias)
        self._out = linear(
            "self_attn", {"o_proj": [hidden]}, query, config.output_bias, own.attended_part
        )
        self._query_norm = norm("self_attn.q_norm", head_dim) if config.qk_norm else None
        self._key_norm = norm("self_attn.k_norm", head_dim) if config.qk_norm else None
        self._gate_up = linear("mlp", gated, hidden, config.mlp_bias, gate=config.activation)
        self._down = linear("mlp", {"down_proj": [hidden]}, inner, config.mlp_bias, own.inner_part)
        self._attention_norm = norm("input_layernorm")
        self._mlp_norm = norm("post_attention_layernorm")

    def __call__(self, hidden: Tensor, delta: Tensor | None, plan: AttentionPlan) -> Tensor:
        """Add the previous block's delta and this block's attention to hidden [T, hidden_size], in
        place; returns the feed-forward's output as the next delta."""
        multiplier = self._config.residual_multiplier
        attended = self._attention(self._attention_norm.add(hidden, delta, multiplier), plan)
        normed = self._mlp_norm.add(hidden, attended, multiplier)
        return self._down(self._gate_up(normed))

    def _attention(self, normed: Tensor, plan: AttentionPlan) -> Tensor:
        """normed [T, hidden_size] → [T, hidden_size]."""
        heads = self._qkv(normed).view(normed.shape[0], -1, self._config.head_dim)
        if self._query_norm is not None and self._key_norm is not None:
            query, key_value = heads.tensor_split([self._own.heads.count], dim=1)
            key = key_value[:, : self._own.kv_heads.count]
            query.copy_(self._query_norm(query))
            key.copy_(self._key_norm(key))
        return self._out(
            self._attend.forward(heads, self._layer, self._window, self._uses_rope, plan)
        )

    def weights(self) -> LayerWeights:
        """For devices that compute all layers as one program."""
        return LayerWeights(
            attention_norm=self._attention_norm.weight,
            qkv=self._qkv.matrix,
            qkv_bias=self._qkv.bias,
            query_norm=None if self._query_norm is None else self._query_norm.weight,
            key_norm=None if self._key_norm is None else self._key_norm.weight,
            out=self._out.matrix,
            out_bias=self._out.bias,
            mlp_norm=self._mlp_norm.weight,
            gate_up=self._gate_up.matrix,
            down=self._down.matrix,
            down_bias=self._down.bias,
            uses_rope=self._uses_rope,
            window=self._window,
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
        self._world = world
        self.partition = own = partition_of(
            config,
            world.rank,
            world.size,
            quantize,
            lambda shape, asked: device.quantized_form(shape, asked).kind,
            fills_up=device.sums_in_parts,
        )
        """This rank's part of the model."""
        self.attention = device.attention(
            own.heads.count, own.kv_heads.count, config.head_dim, config.attention_scale
        )
        self._tokens = TokenWeights(
            parameters, world, own.vocabulary, config.hidden_size, config.tie_word_embeddings
        )
        self._blocks = [
            Block(parameters, world, config, own, layer, self.attention)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(parameters, "model.norm", config.hidden_size, config.norm_eps)
        rotary = RotaryEmbedding(config.rope, device.torch_device)
        self.angles, self.angle_table = rotary.angles, rotary.table
        self.length_rule = rotary.length_rule
        self.recompute_at, self.prompt_scaled_at = rotary.recompute_at, rotary.prompt_scaled_at
        # Recorded passes read all angles from one table.
        self.is_recordable = self.length_rule is None
        self.has_windows = any(config.layer_windows)
        self.cache_shape = CacheShape(
            num_layers=config.num_layers,
            num_kv_heads=own.kv_heads.count,
            head_dim=config.head_dim,
            block_size=self.attention.block_size,
            dtype=device.cache_dtype,
        )
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        # The residual, its norm and the addend; beside them attention or feed-forward.
        self.widest = 3 * config.hidden_size + max(heads, 3 * config.intermediate_size)

    def prepare_recording(self, longest: int) -> None:
        """See Model."""
        self.angle_table(longest)

    def make_states(self, num_rows: int, num_snapshots: int) -> None:
        """See LanguageModel: it keeps none."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Model."""
        config = self.config
        hidden = self._tokens.vectors(batch.input_ids)
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
        logits, divisor = self._tokens.scores(self.normed(hidden)), self.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor

    def normed(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return self._norm.add(hidden, None)

    def weights(self) -> DecoderWeights:
        """See Decoder."""
        layers = [block.weights() for block in self._blocks]
        shares = self.partition
        return DecoderWeights(
            sizes=self.config,
            own=RankSizes(
                num_heads=shares.heads.count,
                num_kv_heads=shares.kv_heads.count,
                intermediate_size=shares.inner.count,
                first_token=shares.vocabulary.start,
                num_tokens=shares.vocabulary.count,
            ),
            world=self._world,
            embedding=self._tokens.table,
            layers=layers,
            norm=self._norm.weight,
            head=self._tokens.head,
        )
