"""The ids of one text in packed arrays: a token takes a few bytes and no Python objects."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# One, two or four bytes: enough for ids and for offsets in a text.
_CODES = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32))


@dataclass(frozen=True, slots=True)
class Encoding:
    """The ids of one text and their offsets; all three arrays have one entry per token."""

    ids: "array[int]"
    # The first character of each token, and its number of characters.
    starts: "array[int]"
    lengths: "array[int]"

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


def packed(values: Sequence[int]) -> "array[int]":
    """Whole numbers >= 0 in the smallest item size."""
    largest = max(values, default=0)
    return array(next(code for code, end in _CODES if largest < end), values)


def encoding_of(made: Any) -> Encoding:
    """From an `Encoding` of the tokenizers library."""
    offsets = made.offsets
    return Encoding(
        packed(made.ids),
        packed([start for start, _ in offsets]),
        packed([stop - start for start, stop in offsets]),
    )


def token_ids_of(made: Any, most: int | None) -> TokenIds:
    """The last `most` ids, or all, from an `Encoding` of the tokenizers library."""
    ids = made.ids
    return TokenIds(len(ids), tuple(ids if most is None else ids[max(0, len(ids) - most) :]))
