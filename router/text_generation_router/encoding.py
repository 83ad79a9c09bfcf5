"""The ids of one text, packed: a token costs some bytes and no Python objects."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# A byte, two, or four; which is enough for ids and for places in a text.
_CODES = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32))


@dataclass(frozen=True, slots=True)
class Encoding:
    """The ids of one text with their places in it; all three have one entry a token."""

    ids: "array[int]"
    # The first character of each token, and how many it has.
    starts: "array[int]"
    lengths: "array[int]"

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """First character of each token in the text, and the one after its last."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            yield start, start + length

    @property
    def num_bytes(self) -> int:
        """What it holds in memory."""
        return sum(len(one) * one.itemsize for one in (self.ids, self.starts, self.lengths))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """How many tokens a text has, and the last of them, as many as were asked for."""

    count: int
    ids: tuple[int, ...]


def packed(values: Sequence[int]) -> "array[int]":
    """Whole numbers >= 0 in as few bytes each as will do."""
    largest = max(values, default=0)
    return array(next(code for code, end in _CODES if largest < end), values)


def encoding_of(made: Any) -> Encoding:
    """Out of what the tokenizers library made."""
    offsets = made.offsets
    return Encoding(
        packed(made.ids),
        packed([start for start, _ in offsets]),
        packed([stop - start for start, stop in offsets]),
    )


def token_ids_of(made: Any, most: int | None) -> TokenIds:
    """The last `most` ids, or all, out of what the tokenizers library made."""
    ids = made.ids
    return TokenIds(len(ids), tuple(ids if most is None else ids[max(0, len(ids) - most) :]))
