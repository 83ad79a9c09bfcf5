"""Finds stop strings in text that arrives in pieces."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A complete stop string."""

    stop_string: str
    # Its end in the last piece, in characters.
    end: int


class StopStrings:
    """Finds the first stop string that is completed, however the text is cut into pieces.

    Keeps only the end of the text that may be the beginning of a stop string: later matches begin
    there or behind it.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        # Of several that end together the longest counts: it begins first.
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._unfinished = ""

    @property
    def num_unfinished(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        return len(self._unfinished)

    def search(self, piece: str) -> StopMatch | None:
        """The stop string that `piece` completes; None without one.

        Of several, the one that ends first counts: so the result does not depend on the pieces.
        Not to be called again after a match.
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
    """Start of the longest end of `text` that is a beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
