"""In which order messages are carried out where there are several ranks: that of their numbers."""

from dataclasses import dataclass
from typing import NamedTuple

from text_generation_shard.errors import BatchError


class Turn(NamedTuple):
    """A message whose turn it is."""

    number: int
    # The first message before it that did not come, and is not waited for; 0: all came.
    missing: int = 0
    # It can do without what is missing.
    may_skip: bool = False


@dataclass(slots=True)
class _Taken:
    """A message that has not had its turn."""

    may_skip: bool
    is_ready: bool = False
    # Nobody waits any longer for what is missing before it.
    is_late: bool = False


class MessageOrder:
    """Owns which messages have come, and which had their turn. Decides, and does nothing.

    Promises: turns come in the order of numbers, each number once. A message waits for those
    before it, unless one is missing and there is one that may do without it, or is late.
    """

    def __init__(self) -> None:
        self.last = 0
        """Number of the last message that had its turn."""
        self._taken: dict[int, _Taken] = {}

    def take(self, number: int, may_skip: bool) -> None:
        """A message has come; BatchError if its number can not have a turn any more. `may_skip`: it
        stands on nothing that was before."""
        if number <= self.last or number in self._taken:
            newest = max(self._taken, default=self.last)
            raise BatchError(
                f"message {number} came again or too late: message {newest} was taken already; "
                "messages to several shards are numbered, each one more than the one before"
            )
        self._taken[number] = _Taken(may_skip)

    def set_ready(self, number: int) -> None:
        """What must be prepared before its turn is prepared."""
        self._taken[number].is_ready = True

    def missing(self, number: int) -> int:
        """The first message before this one that has not come; 0: all have, or it had its turn."""
        if number in self._taken:
            for other in range(self.last + 1, number):
                if other not in self._taken:
                    return other
        return 0

    def set_late(self, number: int) -> None:
        """What is missing before it is not waited for any longer."""
        self._taken[number].is_late = True

    def due(self) -> Turn | None:
        """The next message, if it is its turn; it has it now."""
        number = min(self._taken, default=0)
        if not number or not self._taken[number].is_ready:
            return None
        is_gap = number > self.last + 1
        if is_gap and not any(item.may_skip or item.is_late for item in self._taken.values()):
            return None
        missing = self.last + 1 if is_gap else 0
        self.last = number
        return Turn(number, missing, self._taken.pop(number).may_skip)
