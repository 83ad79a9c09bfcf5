"""The ids of one text in packed arrays: a token takes a few bytes and no Python objects."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# One, two or four bytes: enough for ids and for offsets in a text.
_CODES = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32))
# Number of tokens, length of the arrays, and their type codes (0: no such array).
_HEAD = struct.Struct("<II3sx")


@dataclass(frozen=True, slots=True)
class Encoding:
    """The ids of one text and their offsets; all three arrays have one entry per token."""

    ids: "array[int] | memoryview[int]"
    # The first character of each token, and its number of characters.
    starts: "array[int] | memoryview[int]"
    lengths: "array[int] | memoryview[int]"

    @classmethod
    def of(cls, made: Any) -> "Encoding":
        """From an `Encoding` of the tokenizers library."""
        offsets = made.offsets
        return cls(
            _packed(made.ids),
            _packed([start for start, _ in offsets]),
            _packed([stop - start for start, stop in offsets]),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Encoding":
        """From `to_bytes` of another process."""
        _, (ids, starts, lengths) = _read(data)
        return cls(ids, starts, lengths)

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        return _written(len(self.ids), self.ids, self.starts, self.lengths)

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """The first character of each token, and the one after its last."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            yield start, start + length

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return sum(len(one) * one.itemsize for one in (self.ids, self.starts, self.lengths))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The number of tokens of a text, and the last of its ids, as many as requested."""

    count: int
    ids: tuple[int, ...]

    @classmethod
    def of(cls, made: Any, most: int | None) -> "TokenIds":
        """The last `most` ids, or all, from an `Encoding` of the tokenizers library."""
        ids = made.ids
        return cls(len(ids), tuple(ids if most is None else ids[max(0, len(ids) - most) :]))

    @classmethod
    def from_bytes(cls, data: bytes) -> "TokenIds":
        """From `to_bytes` of another process."""
        count, (ids,) = _read(data)
        return cls(count, tuple(ids))

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        return _written(self.count, _packed(self.ids))


def _packed(values: Sequence[int]) -> "array[int]":
    """Whole numbers >= 0 in the smallest item size."""
    largest = max(values, default=0)
    return array(next(code for code, end in _CODES if largest < end), values)


def _written(count: int, *arrays: "array[int] | memoryview[int]") -> bytes:
    codes = b"".join(memoryview(one).format.encode() for one in arrays)
    return _HEAD.pack(count, len(arrays[0]), codes) + b"".join(map(bytes, arrays))


def _read(data: bytes) -> "tuple[int, list[memoryview[int]]]":
    """The number of tokens, and the arrays in place: a copy of millions of tokens is large."""
    count, length, codes = _HEAD.unpack_from(data)
    arrays, start = [], _HEAD.size
    for code in codes.rstrip(b"\0").decode("ascii"):
        stop = start + length * struct.calcsize(code)
        arrays.append(memoryview(data)[start:stop].cast(code))
        start = stop
    return count, arrays
