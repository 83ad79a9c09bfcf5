"""Texts inside fields: the input of a custom tool, and `encrypted_content`."""

import json
import re
from base64 import b64decode, b64encode

_PREFIX = "plain1."
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


def write_encrypted(text: str) -> str:
    """The field for a reasoning of this text: in base64, and not encrypted.

    Nothing is stored here, and clients with `store: false` keep this field only. There is no secret
    in it: the client has the same text in `content`.
    """
    return _PREFIX + b64encode(text.encode()).decode()


def read_encrypted(field: str) -> str | None:
    """The text of the reasoning; None if another server wrote the field."""
    if not field.startswith(_PREFIX):
        return None
    try:
        return b64decode(field.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return None
