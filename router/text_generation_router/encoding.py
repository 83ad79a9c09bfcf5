"""The ids of one text in arrays: a token takes a few bytes and no Python objects."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Four bytes: enough for ids and for offsets in a text.
_CODE = "I"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The ids of one text and their offsets; all three arrays have one entry per token."""

    ids: "array[int]"
    # The first character of each token, and its number of characters.
    starts: "array[int]"
    lengths: "array[int]"

    @classmethod
    def of(cls, made: Any) -> "Encoding":
        """From an `Encoding` of the tokenizers library."""
        offsets = made.offsets
        starts = array(_CODE, [start for start, _ in offsets])
        lengths = array(_CODE, [stop - start for start, stop in offsets])
        return cls(array(_CODE, made.ids), starts, lengths)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Encoding":
        """From `to_bytes` of another process."""
        whole = array(_CODE, data)
        count = len(whole) // 3
        return cls(whole[:count], whole[count : 2 * count], whole[2 * count :])

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        return bytes(self.ids + self.starts + self.lengths)

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """The first character of each token, and the one after its last."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            yield start, start + length

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return 3 * len(self.ids) * self.ids.itemsize


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
        count, *ids = array(_CODE, data)
        return cls(count, tuple(ids))

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        return bytes(array(_CODE, (self.count, *self.ids)))
