"""Projections of hidden states and their norms, and the weights of tokens."""

import torch
from torch import Tensor

from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.checkpoint.weights import Parameters, Sections
from text_generation_shard.device.base import ALL, Activation, EmbeddingTable, Matrix
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
