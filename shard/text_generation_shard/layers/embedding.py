"""Token ids to vectors, and hidden states to scores; with tied weights, by one matrix.

Each rank has a part of the vocabulary: its vectors and its scores.
"""

import torch
from torch import Tensor

from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device.base import EmbeddingTable, Matrix
from text_generation_shard.parallel import World


class Embedding:
    """One vector per token id: [vocab_size, hidden_size]."""

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        name: str,
        vocabulary: Share,
        hidden_size: int,
    ) -> None:
        self.table: EmbeddingTable
        """This rank's part; set when it is loaded."""
        self.vocabulary, self.inputs = vocabulary, whole(hidden_size)
        """This rank's tokens, and the features of each vector."""
        self._world = world
        self._device, self._quantize = parameters.device, parameters.quantize
        parameters.add_matrix({f"{name}.weight": [vocabulary]}, self.inputs, self._receive)

    def _receive(self, weight: Tensor) -> EmbeddingTable:
        self.table = self._device.embedding(weight, self._quantize)
        return self.table

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] → [T, hidden_size]."""
        if self._world.size == 1:
            return self.table.lookup(input_ids)
        own = input_ids - self.vocabulary.start
        is_elsewhere = (own < 0) | (own >= self.vocabulary.count)
        vectors = self.table.lookup(torch.where(is_elsewhere, 0, own))
        # One rank has the vector, and the sum with zeros is exact.
        return self._world.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))


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
        """This rank's part; set when it is loaded."""
        self._world, self._embedding, self._parameters = world, embedding, parameters
        if tie_word_embeddings:
            # Some checkpoints also store the tied head, as a copy.
            parameters.ignore(f"{name}.weight")
            parameters.after_load(self._tie)
        else:
            sections = {f"{name}.weight": [embedding.vocabulary]}
            parameters.add_matrix(sections, embedding.inputs, self._receive)

    def _tie(self) -> None:
        self.matrix, nbytes = self._embedding.table.as_matrix()
        self._parameters.nbytes += nbytes

    def _receive(self, weight: Tensor) -> Matrix:
        # int8 at least: the error of int4 would go directly into the scores.
        quantize = "int8" if self._parameters.quantize is not None else None
        self.matrix = self._parameters.device.matrix(weight, quantize)
        return self.matrix

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] → logits [S, vocab_size] in float32."""
        if self._world.size == 1:
            return self.matrix(hidden).float()
        scores = self._world.all_gather(self.matrix(hidden))
        return scores[:, : self._embedding.vocabulary.total].float().contiguous()
