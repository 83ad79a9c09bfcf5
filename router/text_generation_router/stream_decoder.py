"""Decodes ids to text one at a time, in whole characters."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Decodes the ids of one generation.

    Joined, the texts of all steps and the final `flush` are the UTF-8 decoding of the tokens'
    joined bytes. No step returns a part of a character.

    A token always stands for the same bytes (see `Tokenizer.token_bytes`), so the only state is the
    start of an incomplete UTF-8 character: three bytes at most. Bytes that can not become a
    character are U+FFFD immediately, so that the stream does not stall.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_inside_character = False
        """Whether the bytes so far end inside a character."""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        text = self._utf8.decode(self._token_bytes(token_id))
        self.is_inside_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """The bytes of an incomplete character as U+FFFD; the next step begins a new character."""
        self.is_inside_character = False
        return self._utf8.decode(b"", final=True)
