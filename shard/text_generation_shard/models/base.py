"""The interface between the engine and a model's implementation."""

from typing import Protocol

from torch import Tensor

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.device import base
from text_generation_shard.device.forward import CacheShape


class LanguageModel(base.Model, Protocol):
    """A loaded model, as the engine sees it."""

    # Why the model is not computed by native code, and what is not supported then; empty: it is.
    not_native: str

    @property
    def config(self) -> ModelConfig:
        """Read from the checkpoint."""

    @property
    def cache_shape(self) -> CacheShape:
        """Of this rank's KV cache."""

    @property
    def widest(self) -> int:
        """About the most numbers that a pass holds for a token at once, to estimate its memory."""

    # Whether the cost of a token stops growing with its context.
    has_windows: bool
    # Whether the model's own operators compute a row bit for bit independently of the other rows.
    is_deterministic: bool
    # Length beyond which a row must be recomputed; None: never.
    recompute_at: int | None
    # Prompt length beyond which keys depend on the prompt's length; None: never.
    prompt_scaled_at: int | None

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state that the model keeps for each row; 0: it keeps none."""

    def make_states(self, num_rows: int, num_snapshots: int) -> None:
        """Allocate this many states and snapshots, `state_bytes` each; first frees the previous
        ones. Not called if `state_bytes` is 0. See ForwardBatch.states."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, hidden_size] after the final norm, from which the head computes
        scores."""
