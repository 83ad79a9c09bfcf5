"""Token ids to vectors and back."""

import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.layers.linear import linear_packed, pack
from text_generation_shard.weights import Parameters


class Embedding:
    """One vector per token id: [vocab_size, hidden_size]."""

    def __init__(
        self, parameters: Parameters, name: str, vocab_size: int, hidden_size: int
    ) -> None:
        self.weight = parameters.add(f"{name}.weight", (vocab_size, hidden_size))

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] → [T, hidden_size]."""
        return F.embedding(input_ids, self.weight)


class LMHead:
    """Hidden states to scores over the vocabulary; shares the embedding's weight when tied."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        embedding: Embedding,
        tie_word_embeddings: bool,
    ) -> None:
        if tie_word_embeddings:
            self._weight = embedding.weight
            # Some checkpoints store the tied head once more; it is the same matrix.
            parameters.ignore(f"{name}.weight")
        else:
            shape = (embedding.weight.shape[0], embedding.weight.shape[1])
            self._weight = parameters.add(f"{name}.weight", shape)
        self._is_packed = False
        parameters.after_load(self._pack)

    def _pack(self) -> None:
        self._weight, self._is_packed = pack(self._weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] → logits [S, vocab_size] in float32."""
        if self._is_packed:
            return linear_packed(hidden, self._weight, None).float()
        return F.linear(hidden, self._weight).float()
