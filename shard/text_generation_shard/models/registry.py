"""Which implementation computes a model, and how it is loaded."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from text_generation_shard.checkpoint.config import LlamaConfig, ModelConfig
from text_generation_shard.checkpoint.weights import Parameters, has_own_head, is_headless
from text_generation_shard.config import ShardConfig
from text_generation_shard.device.base import Device
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.base import LanguageModel
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """A model's configuration, and why transformers computes it; empty: our own code does."""

    config: ModelConfig
    reason: str


def read_config(config: ShardConfig) -> Chosen:
    """The configuration of the model; ModelError if it can not be served."""
    reason = "--model-impl asks for it"
    if config.model_impl != "transformers":
        try:
            given = config.model_path, config.rope_scaling, config.rope_factor
            return Chosen(LlamaConfig.from_hf(*given), "")
        except UnsupportedError as error:
            if config.model_impl == "native":
                raise
            reason = str(error).partition(";")[0]
    if config.rope_scaling is not None:
        what = "--rope-scaling needs the native implementation"
        raise ModelError(f"{what}, and {reason}; leave it out")
    # Takes seconds to import.
    from text_generation_shard.models.hugging_face.config import read_config as read

    return Chosen(read(config.model_path, config.trust_remote_code, config.world_size), reason)


def load_model(
    directory: Path, chosen: Chosen, device: Device, world: World, quantize: str | None
) -> tuple[LanguageModel, int]:
    """The model and the bytes of its weights; ModelError if it can not be loaded."""
    try:
        if isinstance(chosen.config, LlamaConfig):
            return _load_native(directory, chosen.config, device, world, quantize)
        return _load_transformers(directory, chosen, device, world, quantize)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "the weights do not fit into the memory of the GPU; use a smaller --dtype or "
            "--quantize, a smaller model or a larger GPU"
        ) from error


def _load_native(
    directory: Path, config: LlamaConfig, device: Device, world: World, quantize: str | None
) -> tuple[LanguageModel, int]:
    if not config.tie_word_embeddings and is_headless(directory):
        logger.warning(
            "the checkpoint has no lm_head.weight: it is an embedding model, and text that it "
            "generates is meaningless"
        )
        config = replace(config, tie_word_embeddings=True)
    elif config.tie_word_embeddings and has_own_head(directory):
        # As in transformers 5.
        logger.warning(
            "`tie_word_embeddings` is true, and lm_head.weight differs from the embeddings: it is "
            "used; set `tie_word_embeddings` to false in config.json"
        )
        config = replace(config, tie_word_embeddings=False)
    parameters = Parameters(device, quantize)
    model = LlamaModel(parameters, world, config)
    parameters.load(directory)
    return model, parameters.nbytes


def _load_transformers(
    directory: Path, chosen: Chosen, device: Device, world: World, quantize: str | None
) -> tuple[LanguageModel, int]:
    from text_generation_shard.models.hugging_face.check import check
    from text_generation_shard.models.hugging_face.config import TransformersConfig
    from text_generation_shard.models.hugging_face.model import TransformersModel

    assert isinstance(chosen.config, TransformersConfig)
    model = TransformersModel(directory, chosen.config, device, quantize, chosen.reason, world)
    check(model, device)
    logger.info("%s", model.not_native)
    return model, model.nbytes
