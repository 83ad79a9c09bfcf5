"""What a JSON text takes in memory while it is parsed and made into a request, told before it is.

That is the text itself, the parser's copy of it and tree of its values, and the objects of Python.
"""

import re

# Bytes, rounded up: an object or list with the model that is made of it, a key, a string, a value's
# place in the parser's tree and in its list, a number that is an object of its own.
_CONTAINER, _KEY, _STRING, _PLACE, _NUMBER = 1000, 150, 72, 24, 32
# Whole numbers up to 256 are there already.
_OWN_NUMBER = re.compile(rb"-[\d.eE+-]+|\d+[.eE][\d.eE+-]*|\d{4,}|25[7-9]|2[6-9]\d|[3-9]\d\d")
# A text may become so many times its size, and any may become so much.
MOST_TIMES = 10
ALWAYS_ALLOWED = 10_000_000
# A text is looked at in pieces, between which other threads run.
_PIECE = 64 * 1024


def is_too_costly(text: bytes | bytearray) -> bool:
    """Whether the text would take more than `MOST_TIMES` its size, and `ALWAYS_ALLOWED`."""
    allowed = max(ALWAYS_ALLOWED, MOST_TIMES * len(text)) - 2 * len(text)
    # What stands inside of strings is counted as well, so this is too much at most.
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
