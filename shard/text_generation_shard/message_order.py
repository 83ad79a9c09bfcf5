"""The order of messages to several ranks: that of their numbers."""

from dataclasses import dataclass
from typing import NamedTuple

from text_generation_shard.errors import BatchError


class Turn(NamedTuple):
    """A message whose turn it is."""

    number: int
    # The first missing message before it, which is no longer awaited; 0: none is missing.
    missing: int = 0
    # It does not need the missing messages.
    may_skip: bool = False


@dataclass(slots=True)
class _Taken:
    """A message that has not had its turn."""

    may_skip: bool
    is_ready: bool = False
    # Missing messages before it are no longer awaited.
    is_late: bool = False


class MessageOrder:
    """Owns which messages arrived, and which had their turn. It only decides.

    Turns follow the numbers, each number once. A message waits for those before it, until a
    message that may skip them has arrived, or one is late.
    """

    def __init__(self) -> None:
        self.last = 0
        """The number of the last message that had its turn."""
        self._taken: dict[int, _Taken] = {}

    def take(self, number: int, may_skip: bool) -> None:
        """Register a message that arrived; BatchError if its number is too low or a duplicate.
        `may_skip`: it needs no earlier message."""
        if number <= self.last or number in self._taken:
            newest = max(self._taken, default=self.last)
            raise BatchError(
                f"message {number} came again or too late: message {newest} was taken already; "
                "messages to several shards have consecutive numbers"
            )
        self._taken[number] = _Taken(may_skip)

    def set_ready(self, number: int) -> None:
        """The message is prepared and can have its turn."""
        self._taken[number].is_ready = True

    def missing(self, number: int) -> int:
        """The first message before this one that has not arrived; 0: none is missing, or this one
        had its turn."""
        if number in self._taken:
            for other in range(self.last + 1, number):
                if other not in self._taken:
                    return other
        return 0

    def set_late(self, number: int) -> None:
        """Stop waiting for the messages missing before it."""
        self._taken[number].is_late = True

    def due(self) -> Turn | None:
        """Give the next message its turn; None: it must wait."""
        number = min(self._taken, default=0)
        if not number or not self._taken[number].is_ready:
            return None
        is_gap = number > self.last + 1
        if is_gap and not any(item.may_skip or item.is_late for item in self._taken.values()):
            return None
        missing = self.last + 1 if is_gap else 0
        self.last = number
        return Turn(number, missing, self._taken.pop(number).may_skip)
