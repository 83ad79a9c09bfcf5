"""A process that tokenizes long texts, one after the other: `python -m … PARENT tokenizer.json`.

Its standard input is a socket. A call is a `REQUEST` and the text in UTF-8; the answer is a `REPLY`
and the arrays. The process ends with the router, or after `IDLE_S` without a call, which frees the
memory of long texts.
"""

import os
import socket
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from text_generation_process.lifetime import end_with_parent

from text_generation_router.encoding import encoding_of, packed
from text_generation_router.tokenizer_file import read_tokenizer

# Bytes of the text, whether to add special tokens and to return offsets, number of last ids.
REQUEST = struct.Struct("<Q??xxI")
# Number of tokens, length of the arrays, and their type codes (0: no such array).
REPLY = struct.Struct("<II3sx")
ALL = 2**32 - 1
IDLE_S = 30.0


def receive(connection: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises EOFError if the peer has closed the connection."""
    content = bytearray(size)
    receive_into(connection, memoryview(content))
    return content


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills the view. Raises EOFError if the peer has closed the connection."""
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]


def reply(tokenizer: tokenizers.Tokenizer, text: str, request: tuple[bool, bool, int]) -> bytes:
    """The answer for one text, as bytes."""
    adds_special_tokens, wants_offsets, most = request
    [made] = tokenizer.encode_batch([text], add_special_tokens=adds_special_tokens)
    parts: Sequence[array[int]]
    if wants_offsets:
        encoding = encoding_of(made)
        count, parts = len(encoding.ids), (encoding.ids, encoding.starts, encoding.lengths)
    else:
        ids = made.ids
        count = len(ids)
        parts = (packed(ids[max(0, count - most) :] if most != ALL else ids),)
    codes = "".join(part.typecode for part in parts).encode()
    return REPLY.pack(count, len(parts[0]), codes) + b"".join(map(bytes, parts))


def main() -> None:
    """Serves the socket."""
    parent, path = sys.argv[1:]
    end_with_parent(int(parent))
    # Lower priority than the router, whose streams must not wait for a long text.
    os.nice(10)
    tokenizer = read_tokenizer(Path(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with socket.socket(fileno=os.dup(0)) as connection:
        connection.settimeout(IDLE_S)
        try:
            while True:
                size, *request = REQUEST.unpack(receive(connection, REQUEST.size))
                text = receive(connection, size).decode()
                connection.sendall(reply(tokenizer, text, (*request,)))
                del text
        except (EOFError, TimeoutError, ConnectionError):
            return


if __name__ == "__main__":
    main()
