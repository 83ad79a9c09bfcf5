"""Converts text to ids and back, for one model."""

import asyncio
import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from text_generation_process.json_file import content_of, read_settings

from text_generation_router.encoding import Encoding, Made, TokenIds
from text_generation_router.long_texts import LongTexts
from text_generation_router.tokenizer_file import read_tokenizer

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Up to this many characters a text is encoded on the event loop: a thread would take longer, above
# all while the event loop is busy (the interpreter's switch interval).
_SHORT_TEXT = 256
# Longer texts are encoded by another process, after each other. See `LongTexts`.
LONG_TEXT = 32 * 1024
_SPECIAL_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SPECIAL_TOKEN_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls")]


class Tokenizer:
    """The tokenizer of the served model; thread-safe, owns its caches and threads.

    Decoding relies on a property of the decoders that language models use (byte level, byte
    fallback, metaspace, WordPiece): after other tokens, a token always stands for the same bytes.
    They are looked up once per id, so that decoding is a dictionary access.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: dict[str, Any],
        num_workers: int,
        path: Path | None = None,
    ) -> None:
        """`path` is the tokenizer's file; without it long texts are encoded in this process."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")
        self._long_texts = None if path is None else LongTexts(path)
        self._special_ids = frozenset(_special_ids(tokenizer, special_tokens))
        self.token_bytes: Callable[[int], bytes] = cache(self._token_bytes)
        """The token's text after other tokens, in UTF-8; may be part of a character."""
        self.plain_text: Callable[[int], str | None] = cache(self._plain_text)
        """The token's text after other tokens; None for special tokens and parts of characters."""
        decoders = str(tokenizer.decoder and tokenizer.decoder.__getstate__())
        self._is_byte_level = '"ByteLevel"' in decoders
        self._has_byte_fallback = '"ByteFallback"' in decoders
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """The largest id + 1."""
        self._longest_token = max((len(token.encode()) for token in vocabulary), default=1)
        # Any token with text: after it, decoders do not strip the space at the start of a text.
        self._anchor = next((i for i in range(self.vocab_size) if self._decode([i])), 0)
        self._anchor_len = len(self._decode([self._anchor]))
        self.bos_token = content_of(special_tokens.get("bos_token"))
        """The text of the token that starts a sequence, if the model has one."""
        self.eos_token = content_of(special_tokens.get("eos_token"))
        """The text of the token that ends a sequence, if the model has one."""

    @classmethod
    def load(cls, directory: Path, num_workers: int = 2) -> "Tokenizer":
        """Reads `tokenizer.json` and the special tokens that the files beside it name.

        At most `num_workers` texts are encoded at once. Raises ValueError, a sentence for the user,
        if the files can not be used.
        """
        path = directory / "tokenizer.json"
        return cls(read_tokenizer(path), read_settings(directory), num_workers, path)

    async def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """The ids of `text` with their offsets.

        Raises ValueError for text that is not Unicode (lone surrogates), LongTextError.
        """
        return await self._encode(Encoding, text, add_special_tokens, None)

    async def token_ids(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> TokenIds:
        """As `encode`, without offsets, and only the last `most` ids."""
        return await self._encode(TokenIds, text, add_special_tokens, most)

    def least_tokens(self, text: str) -> int:
        """How many tokens the text has at least, if its tokens spell all of it. (A normalizer may
        drop most of a text, and an unknown word may be one token: no text of a user is like that.)
        """
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return -(-num_bytes // self._longest_token)

    def close(self) -> None:
        """Ends the process for long texts."""
        if self._long_texts is not None:
            self._long_texts.close()

    async def _encode(
        self, kind: type[Made], text: str, add_special_tokens: bool, most: int | None
    ) -> Made:
        """Only short texts are encoded on the event loop; long texts wait for each other."""
        text.encode()  # raises UnicodeEncodeError, where the library raises TypeError
        if self._long_texts is not None and len(text) > LONG_TEXT:
            return await self._long_texts.encode(kind, text, add_special_tokens, most)

        def work() -> Made:
            # encode_batch releases the interpreter lock, encode does not.
            [made] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return kind.of(made, most)

        if len(text) <= _SHORT_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special and so not part of the generated text."""
        return token_id in self._special_ids

    def id_of(self, token: str) -> int | None:
        """The id of the token with this spelling, if any."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def added_ids(self) -> dict[str, int]:
        """The ids of all tokens that are added to the vocabulary."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of the texts that are special tokens."""
        known = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in known.items() if token_id in self._special_ids}

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token after other text; U+FFFD for part of a character, empty for an id
        that the tokenizer does not have."""
        return [self.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]

    def stream_decoder(self) -> "StreamDecoder":
        """A decoder for one generation."""
        return StreamDecoder(self.token_bytes)

    def _plain_text(self, token_id: int) -> str | None:
        try:
            return None if self.is_special(token_id) else self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            # An added token is not spelled in the byte alphabet but in plain text.
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if self._has_byte_fallback and (match := _FALLBACK_BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._decode([self._anchor, token_id])[self._anchor_len :].encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StreamDecoder:
    """Decodes the ids of one generation.

    Joined, the texts of all steps and the final `flush` are the UTF-8 decoding of the tokens'
    joined bytes. No step returns a part of a character.

    A token always stands for the same bytes (see `Tokenizer.token_bytes`), so the only state is the
    start of an incomplete UTF-8 character: three bytes at most. Bytes that can not become a
    character are U+FFFD immediately, so that the stream does not stall.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_inside_character = False
        """Whether the bytes so far end inside a character."""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        text = self._utf8.decode(self._token_bytes(token_id))
        self.is_inside_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """The bytes of an incomplete character as U+FFFD; the next step begins a new character."""
        self.is_inside_character = False
        return self._utf8.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_alphabet()


def _special_ids(tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, Any]) -> Iterator[int]:
    """The ids that tokenizer.json marks as special, and those that the files beside it name."""
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            yield token_id
    added = special_tokens.get("added_tokens_decoder")
    for token_id, token in added.items() if isinstance(added, dict) else ():
        if isinstance(token, dict) and token.get("special") and token_id.isdecimal():
            yield int(token_id)
    named = [special_tokens.get(name) for name in _SPECIAL_TOKEN_NAMES]
    for name in _SPECIAL_TOKEN_LISTS:
        more = special_tokens.get(name)
        named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    for content in filter(None, map(content_of, named)):
        known_id = tokenizer.token_to_id(content)
        if known_id is not None:
            yield known_id
