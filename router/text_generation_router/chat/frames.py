"""How the router and its template workers talk: JSON behind its length in bytes."""

import struct
from typing import Any

import orjson

HEADER = struct.Struct(">Q")


def pack(value: Any) -> bytes:
    """One frame. Raises TypeError for what is not JSON."""
    body = orjson.dumps(value)
    return HEADER.pack(len(body)) + body
