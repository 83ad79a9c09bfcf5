"""The interface between the engine and a model; which implementation computes it, and how it is
loaded."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from text_generation_process.flags import ShardConfig
from torch import Tensor

from text_generation_shard.checkpoint.config import LlamaConfig, ModelConfig
from text_generation_shard.checkpoint.weights import Parameters, has_tied_head
from text_generation_shard.device import base
from text_generation_shard.device.base import CacheShape
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)


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


def read_config(config: ShardConfig) -> ModelConfig:
    """The configuration of the model; ModelError if it can not be served."""
    reason = "--model-impl asks for it"
    if config.model_impl != "transformers":
        try:
            return LlamaConfig.from_hf(config.model_path, config.rope_scaling, config.rope_factor)
        except UnsupportedError as error:
            if config.model_impl == "native":
                raise
            reason = str(error).partition(";")[0]
    if config.rope_scaling is not None:
        what = "--rope-scaling needs the native implementation"
        raise ModelError(f"{what}, and {reason}; leave it out")
    # Takes seconds to import.
    from text_generation_shard.models.hugging_face.config import read_config as read

    return read(config.model_path, config.trust_remote_code, reason, config.world_size)


def load_model(
    directory: Path, config: ModelConfig, device: Device, world: World, quantize: str | None
) -> tuple[LanguageModel, int]:
    """The model and the bytes of its weights; ModelError if it can not be loaded."""
    try:
        if isinstance(config, LlamaConfig):
            parameters = Parameters(device, quantize)
            is_tied = has_tied_head(directory, config.tie_word_embeddings)
            config = replace(config, tie_word_embeddings=is_tied)
            native = LlamaModel(parameters, world, config)
            parameters.load(directory)
            return native, parameters.nbytes
        from text_generation_shard.models.hugging_face.config import TransformersConfig
        from text_generation_shard.models.hugging_face.model import TransformersModel, check

        assert isinstance(config, TransformersConfig)
        model = TransformersModel(directory, config, device, quantize, world)
        check(model, device)
        logger.info("%s", model.not_native)
        return model, model.nbytes
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "the weights do not fit into the memory of the GPU; use a smaller --dtype or "
            "--quantize, a smaller model or a larger GPU"
        ) from error
