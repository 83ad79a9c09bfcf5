"""Reads a model's tokenizer, as the files beside it want it to be used."""

from pathlib import Path
from typing import Any

import tokenizers
from text_generation_process.json_file import content_of, read_settings

# As in TGI's router: for these classes the settings decide which special tokens are added to a
# text, not tokenizer.json.
_CLASSES_WITH_SETTINGS = ("LlamaTokenizer", "LlamaTokenizerFast")


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a file. Raises ValueError, a sentence for the user."""
    if not path.is_file():
        raise ValueError(
            f"The model directory {path.parent} has no tokenizer.json; save the model's "
            "tokenizer there with `save_pretrained`."
        )
    settings = read_settings(path.parent)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"The tokenizer {path} cannot be read: {error}") from error
    if not tokenizer.get_vocab_size():
        raise ValueError(f"The tokenizer {path} has no tokens; save the model's tokenizer there.")
    if settings.get("tokenizer_class") in _CLASSES_WITH_SETTINGS:
        _add_as_set(tokenizer, settings)
    return tokenizer


def _add_as_set(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Adds the tokens that the settings name to each text, if the tokenizer has them."""
    adds = {"bos": True, "eos": False}
    for name in adds:
        if isinstance(given := settings.get(f"add_{name}_token"), bool):
            adds[name] = given
    wanted = [content_of(settings.get(f"{name}_token")) for name, is_on in adds.items() if is_on]
    ids = {text: None if text is None else tokenizer.token_to_id(text) for text in wanted}
    if None in ids.values():
        return
    begin, end = (wanted[:1] if adds["bos"] else []), (wanted[-1:] if adds["eos"] else [])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*begin, "$A", *end], special_tokens=list(ids.items())
    )
