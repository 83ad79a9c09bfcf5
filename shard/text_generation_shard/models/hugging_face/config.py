"""What config.json says of a model that transformers computes. Nothing about attention is read
here: the loaded model itself is asked, see `probe`."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from text_generation_shard.checkpoint.config import (
    ModelConfig,
    checkpoint_dtype,
    read_fields,
    token_ids,
)
from text_generation_shard.checkpoint.files import Fields
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.hugging_face.products import check_plan, plan_of

logger = logging.getLogger(__name__)

# Kinds of layers, by their names in `layer_types`.
ATTENDING = frozenset({"full_attention", "sliding_attention", "hybrid", "attention"})
KEEPING_STATE = frozenset({"linear_attention", "conv", "mamba", "mamba2", "hybrid"})
_OTHERS = frozenset({"mlp", "moe"})
# A model whose state has a fixed size names no longest text.
_UNLIMITED = 1 << 17
# Of a model that also sees images, the names of the part for texts.
_PARTS = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A model that transformers computes."""

    # Why it is not computed by native code.
    reason: str
    # transformers' own configuration, of the part that reads and writes text.
    text: Any
    # Its class in transformers, which loads the checkpoint.
    model_class: Any
    # Whether code from the checkpoint's folder may run.
    trusts_code: bool
    # See `plan_of`.
    plan: Mapping[str, str]
    # How names of tensors change; None: not.
    key_mapping: Mapping[str, str] | None

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer; empty: all attend."""
        return list(getattr(self.text, "layer_types", None) or [])


def read_config(
    directory: Path, trusts_code: bool, reason: str, world_size: int = 1
) -> TransformersConfig:
    """ModelError: transformers does not know the model, or it computes something that the cache or
    the batches here can not hold, or it can not be split among ranks."""
    fields = read_fields(directory)
    _check_code(fields, directory, trusts_code)
    with refused(f"transformers {transformers.__version__} does not read {fields.where}"):
        whole = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trusts_code)
        model_class = _model_class(fields, whole, directory, trusts_code)
        text = whole.get_text_config(decoder=True)
        name = model_class.__name__
        _check(text, whole, name)
        plan = plan_of(text, model_class)
        if world_size > 1:
            check_plan(plan, name)
    fields = Fields({**fields.values, "vocab_size": text.vocab_size}, fields.where)
    end_ids, unused_ids = token_ids(fields, directory)
    return TransformersConfig(
        architecture=name,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position=int(getattr(text, "max_position_embeddings", None) or _UNLIMITED),
        eos_token_ids=end_ids,
        unused_ids=unused_ids,
        dtype=checkpoint_dtype(fields),
        reason=reason,
        text=text,
        model_class=model_class,
        trusts_code=trusts_code,
        plan=plan,
        key_mapping=_PARTS if text is not whole else None,
    )


@contextmanager
def refused(what: str) -> Iterator[None]:
    """UnsupportedError if code inside fails: transformers', or the checkpoint's."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"{what} ({type(error).__name__}: {line})") from error


def _check_code(fields: Fields, directory: Path, trusts_code: bool) -> None:
    """ModelError if the checkpoint brings the code of its model, unless that may run."""
    found = fields.values.get("auto_map")
    given = found if isinstance(found, dict) else {}
    names = {str(given[key]) for key in ("AutoConfig", "AutoModelForCausalLM") if key in given}
    if not names:
        return
    if elsewhere := sorted(name for name in names if "--" in name):
        raise ModelError(
            f"{fields.where} names code of another repository ({elsewhere[0]}), which is not "
            "fetched; download it into the model's folder and name it there"
        )
    shown = ", ".join(sorted({name.partition(".")[0] + ".py" for name in names}))
    if trusts_code:
        logger.warning("--trust-remote-code: runs %s of %s if needed", shown, directory)
    elif fields.text("model_type") not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"the model is computed by code in its own folder ({shown}); if you trust that code, "
            "start with --trust-remote-code"
        )


def _model_class(fields: Fields, whole: Any, directory: Path, trusts_code: bool) -> Any:
    """The class that computes a text's next tokens."""
    known: Any = transformers.AutoModelForCausalLM._model_mapping
    # Of a model that also sees images, the part for texts.
    text = whole.get_text_config(decoder=True)
    if kind := next((kind for kind in (type(text), type(whole)) if kind in known), None):
        found = known[kind]
        found = found[0] if isinstance(found, tuple) else found
    elif trusts_code and "AutoModelForCausalLM" in fields.values.get("auto_map", {}):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        name = fields.values["auto_map"]["AutoModelForCausalLM"]
        return get_class_from_dynamic_module(name, directory)
    else:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no decoder for the model type "
            f"{whole.model_type}"
        )
    given = fields.values.get("architectures") or [found.__name__]
    if not any(name == found.__name__ or name.endswith(_DECODING) for name in given):
        raise UnsupportedError(f"the architecture {given[0]} is not supported")
    return found


_DECODING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def _check(text: Any, whole: Any, name: str) -> None:
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} has an encoder, which is not supported")
    kinds = set(getattr(text, "layer_types", None) or []) - ATTENDING - KEEPING_STATE - _OTHERS
    if kinds:
        raise UnsupportedError(
            f"{name} has layers of the kind {', '.join(sorted(kinds))}, which is not supported"
        )
    parameters = getattr(text, "rope_parameters", None) or {}
    given = [item for item in (parameters, *parameters.values()) if isinstance(item, Mapping)]
    ropes = {item["rope_type"] for item in given if "rope_type" in item}
    if found := ropes & {"dynamic", "longrope"}:
        raise UnsupportedError(
            f"{name} with rope of the type {', '.join(sorted(found))} is not supported: "
            "transformers rotates a token by the longest text of its batch"
        )
