"""Token ids to vectors and back. Tied, one matrix serves both.

Ranks share the vocabulary: each has the vectors, and makes the scores, of its part.
"""

import torch
from torch import Tensor

from text_generation_shard.checkpoint.weights import Parameters, Split
from text_generation_shard.device.base import EmbeddingTable, Matrix
from text_generation_shard.parallel import World


class Embedding:
    """One vector per token id: [vocab_size, hidden_size]."""

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        name: str,
        vocab_size: int,
        hidden_size: int,
    ) -> None:
        self.table: EmbeddingTable
        """This rank's part, once it is loaded."""
        self.shape = (vocab_size, hidden_size)
        self._world, self._count = world, world.share(vocab_size, "tokens of the vocabulary")
        self._device, self._quantize = parameters.device, parameters.quantize
        outputs = {f"{name}.weight": (vocab_size,)}
        parameters.add_matrix(outputs, hidden_size, Split.OUTPUTS, self._receive)

    def _receive(self, weight: Tensor) -> EmbeddingTable:
        self.table = self._device.embedding(weight, self._quantize)
        return self.table

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] → [T, hidden_size]."""
        if self._world.size == 1:
            return self.table.lookup(input_ids)
        own = input_ids - self._world.rank * self._count
        is_here = (own >= 0) & (own < self._count)
        vectors = self.table.lookup(torch.where(is_here, own, 0))
        return self._world.all_reduce(vectors * is_here[:, None])


class LMHead:
    """Hidden states to scores over the vocabulary; shares the embedding's weight when tied."""

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        name: str,
        embedding: Embedding,
        tie_word_embeddings: bool,
    ) -> None:
        self.matrix: Matrix
        """This rank's part, once it is loaded."""
        self._world, self._embedding, self._parameters = world, embedding, parameters
        if tie_word_embeddings:
            # Some checkpoints store the tied head once more; it is the same matrix.
            parameters.ignore(f"{name}.weight")
            parameters.after_load(self._tie)
        else:
            vocab_size, hidden_size = embedding.shape
            outputs = {f"{name}.weight": (vocab_size,)}
            parameters.add_matrix(outputs, hidden_size, Split.OUTPUTS, self._receive)

    def _tie(self) -> None:
        self.matrix, nbytes = self._embedding.table.as_matrix()
        self._parameters.nbytes += nbytes

    def _receive(self, weight: Tensor) -> Matrix:
        # In int4 its error would go straight into the scores.
        quantize = "int8" if self._parameters.quantize is not None else None
        self.matrix = self._parameters.device.matrix(weight, quantize)
        return self.matrix

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] → logits [S, vocab_size] in float32."""
        return self._world.all_gather(self.matrix(hidden).float())
