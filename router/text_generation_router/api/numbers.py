"""Numbers as TGI prints them."""

import struct
from math import isfinite

_pack_float32 = struct.Struct("f").pack


def float32(value: float | None) -> float | None:
    """A 32-bit float as the shortest decimal that reads back as the same 32 bits."""
    if value is None or not isfinite(value):
        return None
    bits = _pack_float32(value)
    shortest = float(f"{value:.8g}")
    if _pack_float32(shortest) != bits:
        return float(f"{value:.9g}")
    for digits in (7, 6):
        shorter = float(f"{value:.{digits}g}")
        if _pack_float32(shorter) != bits:
            break
        shortest = shorter
    return shortest
