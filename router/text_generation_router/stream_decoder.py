"""Ids to text, one id at a time, without ever showing half a character."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns the ids of one generation into text that can be sent at once.

    A token is a constant run of bytes (see `tokenizer.Tokenizer.token_bytes`), so the only state is
    the start of a UTF-8 character whose last bytes are still to come: three bytes at most. Bytes
    that can no longer become a character are U+FFFD at once, so nothing stalls the stream.

    Promises: the texts of all steps and the final `flush`, joined, are the UTF-8 decoding of the
    tokens' bytes joined; no step returns a part of a character.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False

    @property
    def is_inside_character(self) -> bool:
        """Whether the next bytes belong to a character that has begun."""
        return self._is_inside_character

    def step(self, token_id: int) -> str:
        """The text that is certain once `token_id` has come; may be empty."""
        text = self._utf8.decode(self._token_bytes(token_id))
        self._is_inside_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """What is still held back, as U+FFFD; afterwards a new character begins."""
        self._is_inside_character = False
        return self._utf8.decode(b"", final=True)
