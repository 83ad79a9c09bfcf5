"""An upper bound of the memory that the JSON of a body takes while it is parsed and validated."""

import re

# Bytes, rounded up: an object or list with the model that is made of it, a key, a string, a value's
# place in the parser's tree and in its list, a number that is an object of its own.
_CONTAINER, _KEY, _STRING, _PLACE, _NUMBER = 1000, 150, 72, 24, 32
# CPython keeps the whole numbers up to 256; larger ones are objects of their own.
_OWN_NUMBER = re.compile(rb"-[\d.eE+-]+|\d+[.eE][\d.eE+-]*|\d{4,}|25[7-9]|2[6-9]\d|[3-9]\d\d")
# A text may take this multiple of its size; any text may take ALWAYS_ALLOWED bytes.
MOST_TIMES = 10
ALWAYS_ALLOWED = 10_000_000
# A text is scanned in pieces; other threads run between them.
_PIECE = 64 * 1024


def is_too_costly(text: bytes | bytearray) -> bool:
    """Whether the text, the parser's copy and tree of values, and the Python objects would take
    more than `MOST_TIMES` the text's size, and `ALWAYS_ALLOWED`."""
    allowed = max(ALWAYS_ALLOWED, MOST_TIMES * len(text)) - 2 * len(text)
    # Counts the contents of strings, too: an upper bound.
    most = _cost(text) + text.count(b",") * _NUMBER
    return most > allowed and cost_outside_strings(text) > allowed


def cost_outside_strings(text: bytes | bytearray) -> int:
    """The bytes of the tree and the objects; text inside of strings costs nothing."""
    cost, is_inside, held = 0, False, b""
    for start in range(0, len(text), _PIECE):
        piece = held + text[start : start + _PIECE]
        # Backslashes at the end belong to what follows.
        end = len(piece.rstrip(b"\\"))
        piece, held = piece[:end], piece[end:]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[is_inside::2])
        cost += _cost(outside) + (len(parts) - 1) * _STRING // 2
        cost += len(_OWN_NUMBER.findall(outside)) * _NUMBER
        is_inside ^= len(parts) % 2 == 0
    return cost


def _cost(text: bytes | bytearray) -> int:
    return (
        (text.count(b"{") + text.count(b"[")) * _CONTAINER
        + text.count(b":") * _KEY
        + text.count(b'"') * _STRING // 2
        + text.count(b",") * _PLACE
    )
