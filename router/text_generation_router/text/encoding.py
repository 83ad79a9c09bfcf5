"""The ids of one text in packed arrays: a token takes a few bytes and no Python objects."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

NUMBER: Final = "I"
"""32 bits: any id, and any offset in a text."""


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
            array(NUMBER, made.ids),
            array(NUMBER, [start for start, _ in offsets]),
            array(NUMBER, [stop - start for start, stop in offsets]),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Encoding":
        """From `to_bytes` of another process, without a copy."""
        numbers = memoryview(data).cast(NUMBER)
        num = len(numbers) // 3
        return cls(numbers[:num], numbers[num : 2 * num], numbers[2 * num :])

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        return b"".join((self.ids, self.starts, self.lengths))

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """The first character of each token, and the one after its last."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            yield start, start + length

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return sum(len(one) * one.itemsize for one in (self.ids, self.starts, self.lengths))
