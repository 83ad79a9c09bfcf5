"""The protocol between the router and its template workers: JSON, preceded by its length."""

import struct
from typing import Any

import orjson

HEADER = struct.Struct(">Q")


def pack(value: Any) -> bytes:
    """One frame. Raises TypeError for a value that JSON can not represent."""
    body = orjson.dumps(value)
    return HEADER.pack(len(body)) + body
