"""Decompresses bodies, never beyond a limit."""

import zlib

ENCODINGS = ("gzip", "x-gzip", "deflate")
"""The known values of `Content-Encoding`."""

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# Ends of members that may follow each other; each costs a new decompressor.
_MOST_MEMBERS = 64


class InflateError(Exception):
    """The body does not have its declared encoding; one sentence."""


class InflatesTooFarError(InflateError):
    """The body is larger than the limit; no more than the limit was decompressed."""


def inflated(compressed: bytes | bytearray, encoding: str, limit: int) -> bytearray:
    """The decompressed bytes, at most `limit`. `encoding` is one of `ENCODINGS`.

    Raises InflateError and InflatesTooFarError.
    """
    window = _ZLIB if encoding == "deflate" else _GZIP
    made = bytearray()
    rest = bytes(compressed)
    for _ in range(_MOST_MEMBERS):
        # Some clients send a raw deflate stream, although HTTP means zlib's format.
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
