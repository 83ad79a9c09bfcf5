"""Long texts are tokenized by a process of their own."""

import socket
import threading
from array import array
from pathlib import Path

from text_generation_process.children import Child

from text_generation_router.encoding import Encoding, TokenIds
from text_generation_router.errors import RouterError
from text_generation_router.tokenizer_child import ALL, ANSWER, QUESTION, receive, receive_into

# The longest text of a payload takes seconds; what takes longer than this never ends.
TIMEOUT_S = 120.0


class LongTextError(RouterError):
    """The process that tokenizes long texts did not do so."""

    def __init__(self) -> None:
        super().__init__("The text could not be tokenized; send a shorter one")


class TokenizerProcess:
    """Owns a child process with the same tokenizer, started when a text comes and none runs.

    In this process the text of a payload would take a hundred times its size, and stop all threads
    for as long as its tokens are made into numbers and are freed. The calls block, and one runs at
    a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._child: Child | None = None

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """The ids with their places. Raises LongTextError."""
        _, (ids, starts, lengths) = self._ask(text, add_special_tokens, True, ALL)
        return Encoding(ids, starts, lengths)

    def token_ids(self, text: str, add_special_tokens: bool, most: int | None) -> TokenIds:
        """The last `most` ids, or all. Raises LongTextError."""
        count, (ids,) = self._ask(text, add_special_tokens, False, ALL if most is None else most)
        return TokenIds(count, tuple(ids))

    def close(self) -> None:
        """Ends the child, also in the middle of a text."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _ask(
        self, text: str, add_special_tokens: bool, places: bool, most: int
    ) -> tuple[int, "list[array[int]]"]:
        content = text.encode()
        question = QUESTION.pack(len(content), add_special_tokens, places, min(most, ALL))
        with self._lock:
            try:
                connection = self._connected()
                connection.sendall(question)
                connection.sendall(content)
                count, told, codes = ANSWER.unpack(receive(connection, ANSWER.size))
                arrays = [array(chr(code), (0,)) * told for code in codes.rstrip(b"\0")]
                for one in arrays:
                    receive_into(connection, memoryview(one).cast("B"))
            except (OSError, EOFError) as error:
                self.close()
                raise LongTextError from error
        return count, arrays

    def _connected(self) -> socket.socket:
        """The connection to a child that runs."""
        # `close` may be called at any time, which makes `_child` None.
        child = self._child
        if child is None or not child.is_alive:
            self.close()
            child = Child("text_generation_router.tokenizer_child", self._path)
            child.connection.settimeout(TIMEOUT_S)
            self._child = child
        return child.connection
