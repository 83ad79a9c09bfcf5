"""Finding stop strings in text that comes in pieces."""


class StopStrings:
    """Looks for the first stop string to be completed, wherever the pieces are cut.

    Keeps only as much text as an unfinished stop string can be long.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stop_strings = stop_strings
        self._tail_len = max(map(len, stop_strings), default=1) - 1
        self._tail = ""

    def search(self, piece: str) -> int | None:
        """How many characters of `piece` are up to and with a stop string; None without one.

        Of several, the one that ends first counts: the answer is the same for every way of cutting
        the text into pieces. Not to be called again after a match.
        """
        if not self._stop_strings or not piece:
            return None
        text = self._tail + piece
        starts = ((text.find(stop), len(stop)) for stop in self._stop_strings)
        ends = [start + length for start, length in starts if start >= 0]
        if ends:
            return max(0, min(ends) - len(self._tail))
        self._tail = text[-self._tail_len :] if self._tail_len > 0 else ""
        return None
