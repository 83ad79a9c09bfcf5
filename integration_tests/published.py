"""Tokenizers as vendors publish them: which tokens are added and special, which added only, and
with which chat template. The vocabulary behind them is the embedded model's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

_ROOT = Path(__file__).parent.parent
_VOCABULARY = _ROOT / "launcher/text_generation_launcher/embedded_model/tokenizer.json"
TEMPLATES = _ROOT / "router/tests/chat_templates"
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FILL = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>")
_CALL, _RESPONSE = ("<tool_call>", "</tool_call>"), ("<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Published:
    """One vendor's tokenizer."""

    template: str
    """The file of its chat template, in our own wording."""
    special: tuple[str, ...]
    """Added tokens with `"special": true`."""
    plain: tuple[str, ...]
    """Added tokens with `"special": false`."""
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    """Whether tokenizer.json itself puts the BOS token first."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """More of tokenizer_config.json."""


_QWEN = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "pad_token": "<|endoftext|>"}
PUBLISHED: Mapping[str, Published] = {
    "qwen2.5": Published(
        "qwen2.5.jinja", _CHATML, (*_CALL, *_FILL), eos="<|im_end|>", config=_QWEN
    ),
    "qwen3": Published(
        "qwen3.jinja",
        _CHATML,
        (*_CALL, *_FILL, *_RESPONSE, *_THINK),
        eos="<|im_end|>",
        config=_QWEN,
    ),
    "llama3.1": Published(
        "llama3.1.jinja",
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"),
            *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        (),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        adds_bos=True,
        config={"tokenizer_class": "PreTrainedTokenizerFast"},
    ),
    "mistral-v0.3": Published(
        "mistral-v0.3.jinja",
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        (),
        eos="</s>",
        bos="<s>",
        adds_bos=True,
        config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    ),
    "mistral-args": Published(
        "mistral-args.jinja",
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]"),
            *("[/SYSTEM_PROMPT]", "[ARGS]", "[THINK]", "[/THINK]"),
        ),
        (),
        eos="</s>",
        bos="<s>",
        adds_bos=True,
        config={"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    ),
    "deepseek-r1": Published(
        "deepseek-r1.jinja",
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<|EOT|>", *_THINK, *_CALL, *_FILL),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        # The class adds the BOS token, tokenizer.json does not.
        config={"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
    ),
    "gpt-oss": Published(
        "gpt-oss.jinja",
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>"),
        ),
        (),
        eos="<|return|>",
        bos="<|startoftext|>",
        config={"tokenizer_class": "PreTrainedTokenizerFast"},
    ),
    "deepseek-v3": Published(
        "deepseek-v3.jinja",
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<|EOT|>"),
        (
            *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        config={"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
    ),
    "smollm3": Published(
        "smollm3.jinja",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        (*_THINK, *_RESPONSE, *_CALL, "<code>", "</code>"),
        eos="<|im_end|>",
        config={"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>"},
    ),
}


def tokenizer_of(name: str, pieces: Sequence[str] = (), plain: Sequence[str] = ()) -> Tokenizer:
    """PUBLISHED[name]'s tokenizer.

    `pieces` are more tokens of the vocabulary, which no text is encoded to; `plain` are more added
    tokens that are not special.
    """
    published = PUBLISHED[name]
    source = json.loads(_VOCABULARY.read_text())
    added = {token["content"] for token in source["added_tokens"]}
    known = [token for token in source["model"]["vocab"] if token not in added]
    own = [spelled(piece) for piece in pieces]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys([*known, *own]))}
    merges = [tuple(pair) for pair in source["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in published.special]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in (*published.plain, *plain)]
    )
    if published.adds_bos and published.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{published.bos} $A",
            special_tokens=[(published.bos, tokenizer.token_to_id(published.bos))],
        )
    return tokenizer


def write_tokenizer(name: str, directory: Path, tokenizer: Tokenizer) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with the chat template."""
    published = PUBLISHED[name]
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": published.bos,
        "eos_token": published.eos,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        },
        "chat_template": (TEMPLATES / published.template).read_text(),
        **published.config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def spelled(text: str) -> str:
    """The text as a byte-level vocabulary spells it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in split.pre_tokenize_str(text))
