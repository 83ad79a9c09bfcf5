"""The input of a custom tool, out of the JSON that the model writes."""

import json
import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters. The first half of a pair is read with what follows it: the second half, or not.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})))*",
    re.DOTALL,
)


class InputReader:
    """Reads the text of `{"input": "…"}` while it is written. Owns what is not read yet."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_open = False

    def feed(self, written: str) -> str:
        """The characters that are known now and were not before."""
        self._rest += written
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        known = _CHARACTERS.match(self._rest)
        assert known is not None
        self._rest = self._rest[known.end() :]
        text: str = json.loads(f'"{known[0]}"', strict=False)
        # Half a pair is no character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
