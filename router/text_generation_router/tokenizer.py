"""Text to ids and ids to text, for one model; no other part of pytgi knows text."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from text_generation_router.encoding import Encoding, TokenIds, encoding_of, token_ids_of
from text_generation_router.lane import Lane
from text_generation_router.stream_decoder import StreamDecoder
from text_generation_router.token_bound import TokenBound
from text_generation_router.tokenizer_process import TokenizerProcess

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Characters that are encoded in less than 0.1 ms. Going to a thread and back costs as much, and
# while the event loop is busy the way back can take 5 ms, the interpreter's switch interval.
_SHORT_TEXT = 256
# Characters from which on a text has a lane of its own: shorter ones take some milliseconds, and
# one must not wait behind many that take longer.
LONG_TEXT = 16 * 1024
# And characters from which on it is tokenized by another process, where only the ids are wanted and
# where places are: here a token takes some 150 and 300 bytes, and Python's lists of so many take
# milliseconds to make and to free, in which no other thread runs.
_MOST_IDS_HERE, _MOST_PLACES_HERE = 64 * 1024, 32 * 1024
_SPECIAL_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
)


Made = TypeVar("Made")


class Tokenizer:
    """The tokenizer of the served model: one per process, thread-safe, never changed after `load`.

    Decoding rests on one law, true of the decoders that language models use (byte level, byte
    fallback, metaspace, WordPiece): behind other tokens, a token always stands for the same bytes.
    Those bytes are looked up once per id, so decoding costs a dictionary access instead of a window
    of ids decoded over and over.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: dict[str, Any],
        num_workers: int,
        path: Path | None = None,
    ) -> None:
        """`path` is the file of the tokenizer; without it long texts are tokenized here, too."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")
        self._long_texts = Lane("long-texts", num_workers)
        self._very_long_texts = Lane("very-long-texts", 1)
        self._process = None if path is None else TokenizerProcess(path)
        self._special_ids = frozenset(_special_ids(tokenizer, special_tokens))
        # Caches, filled as ids are met: at most one entry an id.
        self._bytes_of: dict[int, bytes] = {}
        self._plain_text_of: dict[int, str | None] = {}
        decoders = set(_decoder_types(tokenizer))
        self._is_byte_level = "ByteLevel" in decoders
        self._has_byte_fallback = "ByteFallback" in decoders
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """The largest id + 1."""
        self._bound = TokenBound(tokenizer, vocabulary)
        # Any token with text will do: behind it, decoders no longer strip what starts a text.
        self._anchor = next((i for i in range(self.vocab_size) if self._decode([i])), 0)
        self._anchor_len = len(self._decode([self._anchor]))
        self.bos_token = _content(special_tokens.get("bos_token"))
        """The text of the token that starts a sequence, if the model has one."""
        self.eos_token = _content(special_tokens.get("eos_token"))
        """The text of the token that ends a sequence, if the model has one."""

    @classmethod
    def load(cls, directory: Path, num_workers: int = 2) -> "Tokenizer":
        """Reads `tokenizer.json` and the special tokens named by the files beside it.

        `num_workers` texts are encoded at the same time at most. Raises ValueError, with a sentence
        for the user, when the files cannot be used.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"The model directory {directory} has no tokenizer.json, from which text is turned "
                "into tokens; save the model's tokenizer there with `save_pretrained`."
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"The tokenizer {path} cannot be read: {error}") from error
        if not tokenizer.get_vocab_size():
            raise ValueError(
                f"The tokenizer {path} has no tokens; save the model's tokenizer there."
            )
        special_tokens = _read_object(directory / "special_tokens_map.json")
        special_tokens |= _read_object(directory / "tokenizer_config.json")
        return cls(tokenizer, special_tokens, num_workers, path)

    async def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """The ids of `text` with their places, computed off the event loop unless that would take
        longer. A long text waits for others that are long.

        Raises ValueError for text that is not Unicode (lone surrogates), LongTextError.
        """
        here = partial(self._encode, text, add_special_tokens)
        if self._process is None:
            return await self._run(text, here, here, _MOST_PLACES_HERE)
        there = partial(self._process.encode, text, add_special_tokens)
        return await self._run(text, here, there, _MOST_PLACES_HERE)

    async def token_ids(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> TokenIds:
        """As `encode`, but no places, and of the ids the last `most`, or all."""
        here = partial(self._token_ids, text, add_special_tokens, most)
        if self._process is None:
            return await self._run(text, here, here, _MOST_IDS_HERE)
        there = partial(self._process.token_ids, text, add_special_tokens, most)
        return await self._run(text, here, there, _MOST_IDS_HERE)

    def least_tokens(self, text: str) -> int:
        """`text` has at least so many tokens; 0 where nothing is certain without counting."""
        return self._bound.least_tokens(text)

    def close(self) -> None:
        """Ends the process for long texts. Nothing is encoded any more."""
        if self._process is not None:
            self._process.close()
        self._long_texts.close()
        self._very_long_texts.close()

    async def _run(
        self, text: str, here: Callable[[], Made], there: Callable[[], Made], most_here: int
    ) -> Made:
        """The result of `here`, or for a text of more than so many characters of `there`."""
        text.encode()  # surrogates: a UnicodeEncodeError here, a TypeError from the library
        if len(text) <= _SHORT_TEXT:
            return here()
        if len(text) <= LONG_TEXT:
            return await asyncio.get_running_loop().run_in_executor(self._workers, here)
        if len(text) <= most_here:
            return await self._long_texts.run(here)
        return await self._very_long_texts.run(there)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        # encode_batch gives the interpreter lock back while it works, encode does not.
        [made] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding_of(made)

    def _token_ids(self, text: str, add_special_tokens: bool, most: int | None) -> TokenIds:
        [made] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return token_ids_of(made, most)

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is no part of the text it writes."""
        return token_id in self._special_ids

    def id_of(self, token: str) -> int | None:
        """The id of the token that is spelled so; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those of the texts that are special tokens."""
        known = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in known.items() if token_id in self._special_ids}

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as it reads behind other text; U+FFFD for part of a
        character, empty for an id that the tokenizer does not know."""
        return [self.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for one generation."""
        return StreamDecoder(self.token_bytes)

    def plain_text(self, token_id: int) -> str | None:
        """The token's text behind other tokens; None for special tokens and parts of characters."""
        try:
            return self._plain_text_of[token_id]
        except KeyError:
            text = None if self.is_special(token_id) else _decoded(self.token_bytes(token_id))
            self._plain_text_of[token_id] = text
            return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for behind other tokens, in UTF-8; can be part of a character."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._look_up_bytes(token_id)
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            # An added token is not spelled in the byte alphabet: it is its own text.
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if self._has_byte_fallback and (match := _FALLBACK_BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._decode([self._anchor, token_id])[self._anchor_len :].encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _decoded(spelled: bytes) -> str | None:
    """The text of whole characters."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 is itself, the rest is U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_alphabet()


def _decoder_types(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """The names of the decoder and of its parts."""
    pending = [json.loads(tokenizer.decoder.__getstate__())] if tokenizer.decoder else []
    while pending:
        decoder = pending.pop()
        yield decoder["type"]
        pending.extend(decoder.get("decoders", ()))


def _special_ids(tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, Any]) -> Iterator[int]:
    """The ids that tokenizer.json marks as special, and those that its neighbours name."""
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
    for content in filter(None, map(_content, named)):
        known_id = tokenizer.token_to_id(content)
        if known_id is not None:
            yield known_id


def _content(token: Any) -> str | None:
    """The text of a token written as a string or as an object; None if there is none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value
