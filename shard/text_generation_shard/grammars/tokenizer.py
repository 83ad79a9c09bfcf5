"""llguidance's tokenizer, made of a model's tokenizer file. Does not import torch."""

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')


class GrammarError(ValueError):
    """This request can not go on; other requests can. The message is one sentence for its user."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The path of a model's tokenizer, and its sizes from the model's configuration."""

    path: Path
    vocab_size: int
    eos_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """llguidance's tokenizer; GrammarError if the file can not be used.

        Added tokens are text, as in answers, unless they are special or end tokens.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
            try:
                return self._made_of(text)
            except ValueError:
                return self._made_of(_without_added(self.vocab_size, text))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise GrammarError(
                f"grammars do not work with this model's {self.path.name}: {error}"
            ) from error

    def _made_of(self, text: str) -> LLTokenizer:
        size, end_tokens = self.vocab_size, list(self.eos_ids) or None
        are_text = _added(text) - {*self.eos_ids}
        # llguidance takes all added tokens for special ones.
        slices: list[str] | None = [] if are_text else None
        own = LLTokenizer(text, n_vocab=size, eos_token=end_tokens, slices=slices)
        if not are_text:
            return own
        spelling = TokenizerWrapper(_Spelling(own, are_text))
        return LLTokenizer(spelling, n_vocab=size, eos_token=end_tokens)


def _without_added(vocab_size: int, text: str) -> str:
    """A tokenizer.json without the added tokens that the model does not have."""
    content = json.loads(text)
    missing = [token for token in content["added_tokens"] if token["id"] >= vocab_size]
    for token in missing:
        content["added_tokens"].remove(token)
        if isinstance(vocabulary := content["model"]["vocab"], dict):
            vocabulary.pop(token["content"], None)
    return json.dumps(content)


def _added(tokenizer: str) -> set[int]:
    """The ids of added tokens that are not special. The rest of the file may be large."""
    if (key := _ADDED_TOKENS.search(tokenizer)) is None:
        return set()
    tokens, _ = json.JSONDecoder().raw_decode(tokenizer, key.end())
    return {token["id"] for token in tokens or () if not token["special"]}


class _Spelling:
    """What llguidance asks of a tokenizer, in which `are_text` are no special tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: LLTokenizer, are_text: Set[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.eos_token
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokenizer.is_special_token(token) and token not in are_text
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)
