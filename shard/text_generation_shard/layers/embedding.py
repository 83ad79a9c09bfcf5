"""Token ids to vectors and back.

Quantised, both are int8 whether int8 or int4 was asked for: int4 is nine times as far off, and the
error of the head goes straight into the scores. (llama.cpp does the same.) Tied, one matrix serves
both, so that the vocabulary lies in memory once, a byte a number.
"""

import torch.nn.functional as F
from torch import Tensor

from text_generation_shard.device.cpu.kernels import Place
from text_generation_shard.device.cpu.matrix import FloatMatrix, Matrix, hold, int8_form
from text_generation_shard.device.cpu.quantized import Int8Matrix
from text_generation_shard.device.cpu.tiled import TiledInt8Matrix
from text_generation_shard.weights import Held, Parameters


class Embedding:
    """One vector per token id: [vocab_size, hidden_size]."""

    def __init__(
        self, parameters: Parameters, name: str, vocab_size: int, hidden_size: int
    ) -> None:
        self.shape = (vocab_size, hidden_size)
        self.dtype = parameters.dtype
        self._is_quantised = parameters.quantize is not None
        self._table: Tensor | Int8Matrix | TiledInt8Matrix
        parameters.add_matrix({f"{name}.weight": vocab_size}, hidden_size, self._receive)

    def _receive(self, weight: Tensor) -> Held:
        obstacle = Int8Matrix.obstacle(weight) if self._is_quantised else ""
        if self._is_quantised and not obstacle:
            self._table = int8_form(self.dtype, weight.device)(weight, self.dtype)
            return Held(self._table.kind, self._table.nbytes)
        self._table = weight.to(self.dtype).contiguous()
        kind = str(self.dtype).removeprefix("torch.")
        return Held(kind, self._table.nbytes, obstacle)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] → [T, hidden_size]."""
        if not isinstance(self._table, Tensor):
            return self._table.lookup(input_ids)
        return F.embedding(input_ids, self._table)

    @property
    def address(self) -> int:
        """Of the loaded vectors [vocab_size, hidden_size] of this dtype; 0: they are quantised."""
        return self._table.data_ptr() if isinstance(self._table, Tensor) else 0

    def as_matrix(self) -> tuple[Matrix, int]:
        """The loaded weight for multiplying, and the bytes that takes beside the table."""
        if not isinstance(self._table, Tensor):
            return self._table, 0
        matrix, held = hold(self._table, self.dtype, None)
        return matrix, 0 if isinstance(matrix, FloatMatrix) else held.nbytes


class LMHead:
    """Hidden states to scores over the vocabulary; shares the embedding's weight when tied."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        embedding: Embedding,
        tie_word_embeddings: bool,
    ) -> None:
        self._embedding = embedding
        self._parameters = parameters
        self._quantize = "int8" if parameters.quantize is not None else None
        self._matrix: Matrix
        if tie_word_embeddings:
            # Some checkpoints store the tied head once more; it is the same matrix.
            parameters.ignore(f"{name}.weight")
            parameters.after_load(self._tie)
        else:
            vocab_size, hidden_size = embedding.shape
            parameters.add_matrix({f"{name}.weight": vocab_size}, hidden_size, self._receive)

    def _tie(self) -> None:
        self._matrix, nbytes = self._embedding.as_matrix()
        self._parameters.nbytes += nbytes

    def _receive(self, weight: Tensor) -> Held:
        self._matrix, held = hold(weight, self._embedding.dtype, self._quantize)
        return held

    @property
    def place(self) -> Place | None:
        """See Matrix."""
        return self._matrix.place

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] → logits [S, vocab_size] in float32."""
        return self._matrix(hidden).float()
