"""A process that tokenizes long texts, one after the other: `python -m … PARENT tokenizer.json`.

Its standard input is a socket. A text comes as `QUESTION` and its UTF-8, and goes as `ANSWER` and
the arrays. It ends when the router does, or when nothing has come for `IDLE_S`, so that what a
long text took goes back to the system.
"""

import os
import socket
import struct
import sys
from array import array
from collections.abc import Sequence

import tokenizers
from text_generation_process.lifetime import end_with_parent

from text_generation_router.encoding import encoding_of, packed

# Bytes of the text, whether special tokens are added, whether places are wanted, and how many ids
# at most, the last ones.
QUESTION = struct.Struct("<Q??xxI")
# How many tokens there are, how many are told, and the kinds of the arrays (0: no such array).
ANSWER = struct.Struct("<II3sx")
ALL = 2**32 - 1
IDLE_S = 30.0


def receive(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. Raises EOFError where the other side has gone."""
    content = bytearray(size)
    receive_into(connection, memoryview(content))
    return content


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills the view. Raises EOFError where the other side has gone."""
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]


def answer(tokenizer: tokenizers.Tokenizer, text: str, question: tuple[bool, bool, int]) -> bytes:
    """What is written back for a text."""
    adds_special_tokens, wants_places, most = question
    [made] = tokenizer.encode_batch([text], add_special_tokens=adds_special_tokens)
    parts: Sequence[array[int]]
    if wants_places:
        encoding = encoding_of(made)
        count, parts = len(encoding.ids), (encoding.ids, encoding.starts, encoding.lengths)
    else:
        ids = made.ids
        count = len(ids)
        parts = (packed(ids[max(0, count - most) :] if most != ALL else ids),)
    codes = "".join(part.typecode for part in parts).encode()
    return ANSWER.pack(count, len(parts[0]), codes) + b"".join(map(bytes, parts))


def main() -> None:
    """Serves the socket."""
    parent, path = sys.argv[1:]
    end_with_parent(int(parent))
    # Streams go first: whoever sends a long text can wait.
    os.nice(10)
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with socket.socket(fileno=os.dup(0)) as connection:
        connection.settimeout(IDLE_S)
        try:
            while True:
                size, *question = QUESTION.unpack(receive(connection, QUESTION.size))
                text = receive(connection, size).decode()
                connection.sendall(answer(tokenizer, text, (*question,)))
                del text
        except (EOFError, TimeoutError, ConnectionError):
            return


if __name__ == "__main__":
    main()
