"""Tokenizes long texts, one after the other, in a process of its own.

In the router a long text would take many times its size in memory, and would block all threads
while Python's lists of its tokens are made and freed.
"""

import os
import struct
from pathlib import Path
from typing import Any

from text_generation_process.worker import Worker, WorkerError

from text_generation_router.encoding import Encoding, TokenIds
from text_generation_router.errors import RouterError
from text_generation_router.executor import Executor
from text_generation_router.tokenizer_file import read_tokenizer

# The longest text of a payload takes seconds, far less than this.
_TIMEOUT_S = 120.0
# Whether to add special tokens, and the number of last ids; the text in UTF-8 follows.
_HEAD = struct.Struct("<?I")
_ALL = 2**32 - 1


class LongTextError(RouterError):
    """The process failed to tokenize a text."""

    def __init__(self) -> None:
        super().__init__("The text could not be tokenized; send a shorter one")


class LongTexts:
    """Owns the process, which starts with the first text, and the queue of texts for it."""

    def __init__(self, path: Path) -> None:
        """`path` is the tokenizer's file."""
        self._queue = Executor("long-texts", 1)
        # The size of bodies limits its memory.
        self._worker = Worker(__name__, str(path).encode(), memory_bytes=None)

    async def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """The ids with their offsets. Raises LongTextError."""
        answer = await self._queue.run(self._call, "encode", text, add_special_tokens, None)
        return Encoding.from_bytes(answer)

    async def token_ids(self, text: str, add_special_tokens: bool, most: int | None) -> TokenIds:
        """The last `most` ids, or all. Raises LongTextError."""
        answer = await self._queue.run(self._call, "token_ids", text, add_special_tokens, most)
        return TokenIds.from_bytes(answer)

    def close(self) -> None:
        """Ends the process, even in the middle of a text."""
        self._worker.close()
        self._queue.close()

    def _call(self, function: str, text: str, add_special_tokens: bool, most: int | None) -> bytes:
        head = _HEAD.pack(add_special_tokens, _ALL if most is None else min(most, _ALL))
        try:
            return self._worker.call(function, head + text.encode(), _TIMEOUT_S)
        except WorkerError as error:
            raise LongTextError from error


# ---- In the process ----


def prepare(argument: bytes) -> "_Tokenizer":
    """`argument` is the path of the tokenizer's file."""
    return _Tokenizer(Path(argument.decode()))


class _Tokenizer:
    def __init__(self, path: Path) -> None:
        # Lower priority than the router, whose streams must not wait for a long text.
        os.nice(10)
        self._tokenizer = read_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, argument: bytes) -> bytes:
        """An `Encoding`."""
        made, _ = self._made(argument)
        return Encoding.of(made).to_bytes()

    def token_ids(self, argument: bytes) -> bytes:
        """The `TokenIds`."""
        made, most = self._made(argument)
        return TokenIds.of(made, None if most == _ALL else most).to_bytes()

    def _made(self, argument: bytes) -> tuple[Any, int]:
        """What the library returns, and the number of last ids."""
        adds_special_tokens, most = _HEAD.unpack_from(argument)
        text = argument[_HEAD.size :].decode()
        return self._tokenizer.encode(text, add_special_tokens=adds_special_tokens), most
