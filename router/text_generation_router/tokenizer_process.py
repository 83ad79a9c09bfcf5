"""Tokenizes long texts in a child process."""

import socket
import threading
from array import array
from pathlib import Path

from text_generation_process.children import Child

from text_generation_router.encoding import Encoding, TokenIds
from text_generation_router.errors import RouterError
from text_generation_router.tokenizer_child import ALL, REPLY, REQUEST, receive, receive_into

# The longest text of a payload takes seconds, far less than this.
TIMEOUT_S = 120.0


class LongTextError(RouterError):
    """The child process failed to tokenize a text."""

    def __init__(self) -> None:
        super().__init__("The text could not be tokenized; send a shorter one")


class TokenizerProcess:
    """Owns a child process with the same tokenizer, started for a text when none runs.

    In this process a long text would take many times its size in memory, and would block all
    threads while Python's lists of its tokens are made and freed. Calls block; one runs at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._child: Child | None = None

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """The ids with their offsets. Raises LongTextError."""
        _, (ids, starts, lengths) = self._call(text, add_special_tokens, True, ALL)
        return Encoding(ids, starts, lengths)

    def token_ids(self, text: str, add_special_tokens: bool, most: int | None) -> TokenIds:
        """The last `most` ids, or all. Raises LongTextError."""
        count, (ids,) = self._call(text, add_special_tokens, False, ALL if most is None else most)
        return TokenIds(count, tuple(ids))

    def close(self) -> None:
        """Ends the child, even in the middle of a text."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _call(
        self, text: str, add_special_tokens: bool, offsets: bool, most: int
    ) -> tuple[int, "list[array[int]]"]:
        content = text.encode()
        head = REQUEST.pack(len(content), add_special_tokens, offsets, min(most, ALL))
        with self._lock:
            try:
                connection = self._connected()
                connection.sendall(head)
                connection.sendall(content)
                count, length, codes = REPLY.unpack(receive(connection, REPLY.size))
                arrays = [array(chr(code), (0,)) * length for code in codes.rstrip(b"\0")]
                for one in arrays:
                    receive_into(connection, memoryview(one).cast("B"))
            except (OSError, EOFError) as error:
                self.close()
                raise LongTextError from error
        return count, arrays

    def _connected(self) -> socket.socket:
        """The connection to a running child."""
        # `close` may set `_child` to None at any time.
        child = self._child
        if child is None or not child.is_alive:
            self.close()
            child = Child("text_generation_router.tokenizer_child", self._path)
            child.connection.settimeout(TIMEOUT_S)
            self._child = child
        return child.connection
