"""How a model is loaded."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from text_generation_shard.checkpoint.config import ModelConfig
from text_generation_shard.checkpoint.weights import Parameters, has_own_head, is_headless
from text_generation_shard.device.base import Device
from text_generation_shard.errors import ModelError
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)


def load_model(
    directory: Path, config: ModelConfig, device: Device, world: World, quantize: str | None
) -> tuple[LlamaModel, int]:
    """The model and the bytes of its weights; ModelError if it can not be loaded."""
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
    try:
        model = LlamaModel(parameters, world, config)
        parameters.load(directory)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "the weights do not fit into the memory of the GPU; use a smaller --dtype or "
            "--quantize, a smaller model or a larger GPU"
        ) from error
    return model, parameters.nbytes
