"""Bodies that were compressed for their way here: inflated, and never further than a limit."""

import zlib

ENCODINGS = ("gzip", "x-gzip", "deflate")
"""The values of `Content-Encoding` that are understood, besides none."""

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# Ends of members that may follow each other; each costs a new decompressor.
_MOST_MEMBERS = 64


class InflateError(Exception):
    """What was sent is not what its encoding says; one sentence."""


class InflatesTooFarError(InflateError):
    """There is more than the limit allows; no more than that was ever made."""


def inflated(compressed: bytes | bytearray, encoding: str, limit: int) -> bytearray:
    """The bytes that were compressed, at most `limit`. `encoding` is one of `ENCODINGS`.

    Raises InflateError, and InflatesTooFarError before there is more than the limit.
    """
    window = _ZLIB if encoding == "deflate" else _GZIP
    made = bytearray()
    rest = bytes(compressed)
    for _ in range(_MOST_MEMBERS):
        # Some send the bare stream where HTTP means zlib's.
        if window == _ZLIB and not _has_zlib_header(rest):
            window = _RAW
        member = zlib.decompressobj(window)
        try:
            made += member.decompress(rest, limit + 1 - len(made))
        except zlib.error as error:
            raise InflateError(f"it is not {encoding}: {error}") from None
        if len(made) > limit:
            raise InflatesTooFarError
        if not member.eof:
            raise InflateError(f"its {encoding} stream is cut off")
        rest = member.unused_data
        if not rest:
            return made
        if window != _GZIP:
            raise InflateError(f"something follows its {encoding} stream")
    raise InflateError(f"it has more than {_MOST_MEMBERS} members")


def _has_zlib_header(stream: bytes) -> bool:
    return len(stream) >= 2 and stream[0] & 15 == 8 and (stream[0] << 8 | stream[1]) % 31 == 0
