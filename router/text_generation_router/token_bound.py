"""A lower bound on the number of tokens of a text, from its number of bytes."""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

# These never shorten a text; others may.
_KEEPING_NORMALIZERS = frozenset({"ByteLevel", "Prepend"})
# These do not change the length of ASCII text.
_KEEPING_ASCII = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})
# A normalizer can turn a space, one byte, into a character of three.
_LARGEST_GROWTH = 3


class TokenBound:
    """Holds the most bytes that one token of a tokenizer can stand for, if there is a limit.

    There is one if no step drops or merges text of any length and every byte has a token, so that
    the tokens of a text spell all of it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> None:
        normalizers = list(parts(tokenizer.normalizer, "normalizers"))
        splitters = list(parts(tokenizer.pre_tokenizer, "pretokenizers"))
        kinds = {part["type"] for part in (*normalizers, *splitters)}
        self._only_ascii = any(part["type"] in _KEEPING_ASCII for part in normalizers)
        added = tokenizer.get_added_tokens_decoder().values()
        self._longest: int | None = None
        if (
            all(map(_keeps_text, normalizers))
            and all(map(_keeps_pieces, splitters))
            and _spells_everything(tokenizer.model, vocabulary, "ByteLevel" in kinds)
            # Such a token absorbs any number of spaces.
            and not any(token.lstrip or token.rstrip for token in added)
        ):
            grown = _LARGEST_GROWTH if normalizers else 1
            longest_added = max((len(token.content.encode()) for token in added), default=0)
            in_model = vocabulary.keys() - {token.content for token in added}
            size = len if "ByteLevel" in kinds else lambda token: len(token.encode())
            self._longest = max(1, max(map(size, in_model), default=0), (longest_added + 1) * grown)

    def least_tokens(self, text: str) -> int:
        """The least number of tokens of the text; 0 if there is no bound."""
        is_ascii = text.isascii()
        if self._longest is None or (self._only_ascii and not is_ascii):
            return 0
        num_bytes = len(text) if is_ascii else len(text.encode())
        return -(-num_bytes // self._longest)


def _keeps_text(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
    return part["type"] in _KEEPING_NORMALIZERS | _KEEPING_ASCII


def _keeps_pieces(part: dict[str, Any]) -> bool:
    return part["type"] in _KEEPING_SPLITTERS and part.get("behavior") != "Removed"


def _spells_everything(model: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return all(one in vocabulary for one in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """The descriptions of a component, or of the members of a sequence."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending.extend(part[name])
        else:
            yield part
