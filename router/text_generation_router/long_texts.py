"""Tokenizes long texts, one after the other, in a process of its own.

In the router a long text would take many times its size in memory, and would block all threads
while Python's lists of its tokens are made and freed.
"""

import os
import struct
from pathlib import Path

from text_generation_process.worker import Worker, WorkerError

from text_generation_router.encoding import Encoding, Made, TokenIds
from text_generation_router.errors import RouterError
from text_generation_router.executor import Executor
from text_generation_router.tokenizer_file import read_tokenizer

# The longest text of a payload takes seconds, far less than this.
_TIMEOUT_S = 120.0
# Whether to give ids only, whether to add special tokens, the number of last ids. The text follows.
_HEAD = struct.Struct("<??I")
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

    async def encode(
        self, kind: type[Made], text: str, add_special_tokens: bool, most: int | None
    ) -> Made:
        """The ids with their offsets, or the last `most` ids. Raises LongTextError."""
        most = _ALL if most is None else min(most, _ALL)
        head = _HEAD.pack(kind is TokenIds, add_special_tokens, most)
        return kind.from_bytes(await self._queue.run(self._call, head + text.encode()))

    def close(self) -> None:
        """Ends the process, even in the middle of a text."""
        self._worker.close()
        self._queue.close()

    def _call(self, argument: bytes) -> bytes:
        try:
            return self._worker.call("encode", argument, _TIMEOUT_S)
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
        """An `Encoding`, or the `TokenIds`."""
        is_ids, adds_special_tokens, most = _HEAD.unpack_from(argument)
        text = argument[_HEAD.size :].decode()
        made = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        kind = TokenIds if is_ids else Encoding
        return kind.of(made, None if most == _ALL else most).to_bytes()
