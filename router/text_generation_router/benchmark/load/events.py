"""Reads the events of a stream, in the forms that servers send."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

_DONE = b"[DONE]"
# The fields of text in OpenAI's deltas.
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
# In bytes.
_MAX_EVENT = 1 << 20


@dataclass(frozen=True, slots=True)
class Event:
    """The content of one event."""

    has_text: bool = False
    is_last: bool = False
    """Whether it ends the generation; an event with counts may follow."""
    counts: tuple[int, int] | None = None
    """(prompt tokens, generated tokens), as the server counts them."""
    error: str | None = None


def read_tgi(event: dict[str, Any]) -> Event:
    """An event of /generate_stream, which has a token; its text may be empty."""
    if "error" in event:
        return Event(error=str(event["error"]))
    details = event.get("details")
    counts = None
    if details is not None:
        counts = (int(details.get("input_length") or 0), int(details["generated_tokens"]))
    return Event("token" in event, event.get("generated_text") is not None, counts)


def read_openai(event: dict[str, Any]) -> Event:
    """A chunk of /v1/chat/completions or /v1/completions. A delta with only a role has no text."""
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        return Event(error=str(message))
    usage = event.get("usage")
    counts = None
    if usage:
        counts = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    has_text = is_last = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        has_text |= bool(choice.get("text")) or any(delta.get(name) for name in _TEXTS)
        is_last |= choice.get("finish_reason") is not None
    return Event(has_text, is_last, counts)


class StreamReader:
    """Reads one stream of server-sent events; never raises, and ignores data after a failure.

    `times` are the arrivals of events with text, `last_s` is that of the generation's last event.
    """

    def __init__(self, read: Callable[[dict[str, Any]], Event]) -> None:
        self.times = array("d")
        self.last_s: float | None = None
        self.counts: tuple[int, int] | None = None
        self.failure: tuple[str, str] | None = None
        """(kind, message) of the event that ended the stream."""
        self.is_finished = False
        self._read = read
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes, arrived: float) -> None:
        """Reads bytes that arrived at this time; an empty line ends an event."""
        if self.failure is not None:
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line.strip():
                self._end_event(arrived)
        if len(self._pending) + sum(len(line) + 1 for line in self._data) > _MAX_EVENT:
            self._fail("bad event", f"an event of more than {_MAX_EVENT} bytes")

    def close(self, arrived: float) -> None:
        """The stream has ended; some servers omit the last empty line."""
        self.feed(b"\n\n", arrived)
        if not self.is_finished:
            self._fail("cut stream", "the stream ended without its last event")

    def _end_event(self, arrived: float) -> None:
        if not self._data or self.failure is not None:
            self._data.clear()
            return
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        if data == _DONE:
            self.is_finished = True
            return
        try:
            event = self._read(orjson.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError):
            self._fail("bad event", f"not a valid event: {data[:200].decode(errors='replace')}")
            return
        if event.error is not None:
            self._fail("error event", event.error)
        if event.has_text:
            self.times.append(arrived)
        if event.has_text or event.is_last:
            self.last_s = arrived
        self.counts = event.counts or self.counts
        self.is_finished |= event.is_last

    def _fail(self, kind: str, message: str) -> None:
        if self.failure is None:
            self.failure = (kind, one_line(message))
            self._pending = b""
            self._data.clear()


def one_line(text: str) -> str:
    """A server's message for a table: one line, and short, because each failed request keeps it."""
    return " ".join(text.split())[:300]
