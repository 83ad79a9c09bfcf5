"""Finding stop strings in text that comes in pieces."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that is complete."""

    stop_string: str
    # Characters of the last piece up to and with it.
    end: int


class StopStrings:
    """Looks for the first stop string to be completed, wherever the pieces are cut.

    Keeps only the end of the text that may be the beginning of a stop string: whatever is found
    later begins there or after it.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        # Of those that end together the longest counts: it begins first.
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._unfinished = ""

    @property
    def num_unfinished(self) -> int:
        """How many characters at the end of the text can still become a stop string."""
        return len(self._unfinished)

    def search(self, piece: str) -> StopMatch | None:
        """The stop string that `piece` completes; None without one.

        Of several, the one that ends first counts: the answer is the same for every way of cutting
        the text into pieces. Not to be called again after a match.
        """
        if not self._stop_strings or not piece:
            return None
        text = self._unfinished + piece
        starts = ((text.find(stop), stop) for stop in self._stop_strings)
        matches = [
            StopMatch(stop, max(0, start + len(stop) - len(self._unfinished)))
            for start, stop in starts
            if start >= 0
        ]
        if matches:
            return min(matches, key=lambda match: match.end)
        begins = min(_unfinished_start(text, stop) for stop in self._stop_strings)
        self._unfinished = text[begins:]
        return None


def _unfinished_start(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is the beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
