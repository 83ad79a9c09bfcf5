"""Converts text to ids and back, for one model.

Long texts are tokenized one after the other in a process of its own, which runs `prepare` of this
module. In the router a long text would take many times its size in memory, and would block all
threads while Python's lists of its tokens are made and freed.
"""

import asyncio
import codecs
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from text_generation_process.json_file import content_of, read_settings
from text_generation_process.worker import Worker, WorkerError

from text_generation_router.errors import RouterError
from text_generation_router.executor import Executor
from text_generation_router.text.encoding import NUMBER, Encoding

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Up to this many characters a text is encoded on the event loop: a thread would take longer, above
# all while the event loop is busy (the interpreter's switch interval).
_SHORT_TEXT = 256
# Longer texts are encoded by another process, after each other.
LONG_TEXT = 32 * 1024
# The longest text of a payload takes seconds, far less than this.
_LONG_TEXT_S = 120.0
# As in TGI's router: for these classes the settings decide which special tokens are added to a
# text, not tokenizer.json.
_CLASSES_WITH_SETTINGS = ("LlamaTokenizer", "LlamaTokenizerFast")
_SPECIAL_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SPECIAL_TOKEN_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls")]

Made = TypeVar("Made")


class Tokenizer:
    """The tokenizer of the served model; thread-safe, owns its caches, its threads and the
    process for long texts, which starts with the first one.

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
        self._tokenizer = _plain(tokenizer)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")
        # The size of bodies limits the memory of the process.
        name, argument = "text_generation_router.text.tokenizer", str(path).encode()
        self._worker = None if path is None else Worker(name, argument, memory_bytes=None)
        self._long_texts = Executor("long-texts", 1)
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
        """The ids of `text` with their offsets. Raises ValueError for text that is not Unicode
        (lone surrogates), and RouterError if the process for long texts fails."""
        return await self._encode(
            text, add_special_tokens, "encoding", Encoding.of, Encoding.from_bytes
        )

    async def token_ids(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """As `encode`, without offsets."""
        return await self._encode(text, add_special_tokens, "ids", _ids_of, _ids_from_bytes)

    def least_tokens(self, text: str) -> int:
        """How many tokens the text has at least, if its tokens spell all of it. (A normalizer may
        drop most of a text, and an unknown word may be one token: no text of a user is like that.)
        """
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return -(-num_bytes // self._longest_token)

    def close(self) -> None:
        """Ends the process for long texts, even in the middle of one."""
        if self._worker is not None:
            self._worker.close()
        self._long_texts.close()

    async def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        function: str,
        of: Callable[[tokenizers.Encoding], Made],
        from_bytes: Callable[[bytes], Made],
    ) -> Made:
        """What `of` makes of the encoding here, or `from_bytes` of what `function` of the process
        returns. Only short texts are encoded on the event loop; long texts wait for each other."""
        data = text.encode()  # raises UnicodeEncodeError, where the library raises TypeError
        if self._worker is not None and len(text) > LONG_TEXT:
            argument = bytes([add_special_tokens]) + data
            try:
                return from_bytes(
                    await self._long_texts.run(self._worker.call, function, argument, _LONG_TEXT_S)
                )
            except WorkerError as error:
                raise RouterError("The text could not be tokenized; send a shorter one") from error

        def work() -> Made:
            # encode_batch releases the interpreter lock, encode does not.
            [made] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return of(made)

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


# ---- Reading a model's tokenizer ----


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a file. Raises ValueError, a sentence for the user."""
    if not path.is_file():
        raise ValueError(
            f"The model directory {path.parent} has no tokenizer.json; save the model's "
            "tokenizer there with `save_pretrained`."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"The tokenizer {path} cannot be read: {error}") from error
    if not tokenizer.get_vocab_size():
        raise ValueError(f"The tokenizer {path} has no tokens; save the model's tokenizer there.")
    settings = read_settings(path.parent)
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


def _plain(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same one, which neither cuts texts off nor fills them up."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids_of(made: tokenizers.Encoding) -> Sequence[int]:
    ids: list[int] = made.ids
    return ids


def _ids_from_bytes(data: bytes) -> Sequence[int]:
    return memoryview(data).cast(NUMBER)


# ---- In the process for long texts ----


def prepare(argument: bytes) -> "_LongTexts":
    """`argument` is the path of the tokenizer's file."""
    return _LongTexts(Path(argument.decode()))


class _LongTexts:
    """Functions of the process: the argument says whether to add special tokens, and the text."""

    def __init__(self, path: Path) -> None:
        # Lower priority than the router, whose streams must not wait for a long text.
        os.nice(10)
        self._tokenizer = _plain(read_tokenizer(path))

    def encoding(self, argument: bytes) -> bytes:
        """The bytes of an `Encoding`."""
        return Encoding.of(self._made(argument)).to_bytes()

    def ids(self, argument: bytes) -> bytes:
        """The ids alone."""
        return array(NUMBER, self._made(argument).ids).tobytes()

    def _made(self, argument: bytes) -> tokenizers.Encoding:
        text = argument[1:].decode()
        return self._tokenizer.encode(text, add_special_tokens=bool(argument[0]))
