"""Numbers as TGI prints them."""

import struct
from math import isfinite

import orjson

_pack_float32 = struct.Struct("f").pack


def float32(value: float | None) -> float | None:
    """A 32-bit float as the shortest decimal that reads back as the same 32 bits."""
    return None if value is None or not isfinite(value) else float(_shortest(value))


def float32_json(value: float | None) -> str:
    """The JSON of `float32(value)`; one is written for every token."""
    if value is None or not isfinite(value):
        return "null"
    digits = _shortest(value)
    # Whole numbers and very small ones are spelled differently in JSON.
    if "." not in digits or "e" in digits:
        return orjson.dumps(float(digits)).decode()
    return digits


def _shortest(value: float) -> str:
    bits = _pack_float32(value)
    shortest = f"{value:.8g}"
    if _pack_float32(float(shortest)) != bits:
        return f"{value:.9g}"
    for shorter in (f"{value:.7g}", f"{value:.6g}"):
        if _pack_float32(float(shorter)) != bits:
            break
        shortest = shorter
    return shortest
