"""The requests of each kind of server, and one answer as a stream of events."""

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

# The fields of text in OpenAI's deltas.
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


@dataclass(frozen=True, slots=True)
class Event:
    """The content of one event."""

    has_text: bool = False
    is_last: bool = False
    """Whether it ends the generation; an event with counts may follow."""
    counts: tuple[int, int] | None = None
    """(prompt tokens, generated tokens), as the server counts them."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Api:
    """One form of requests and events."""

    path: str
    body: Callable[[str, int, str, bool], dict[str, Any]]
    """(prompt, output tokens, model, whether to ignore the end of sequence) → a greedy request."""
    read: Callable[[Mapping[str, Any]], Event]


def _tgi_body(prompt: str, output_tokens: int, _model: str, ignore_eos: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": output_tokens, "details": True}
    if ignore_eos:
        parameters["ignore_eos_token"] = True  # TGI ignores the field
    return {"inputs": prompt, "parameters": parameters}


def _openai_body(prompt: str, output_tokens: int, model: str, ignore_eos: bool) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "stream": True, "temperature": 0}
    body |= {"max_tokens": output_tokens, "stream_options": {"include_usage": True}}
    # As vLLM and llama.cpp spell it.
    return {**body, "ignore_eos": True} if ignore_eos else body


def _chat_body(prompt: str, output_tokens: int, model: str, ignore_eos: bool) -> dict[str, Any]:
    body = _openai_body(prompt, output_tokens, model, ignore_eos)
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return body


def read_tgi(event: Mapping[str, Any]) -> Event:
    """An event of /generate_stream, which has a token; its text may be empty."""
    if "error" in event:
        return Event(error=str(event["error"]))
    counts = None
    if (details := event.get("details")) is not None:
        counts = (int(details.get("input_length") or 0), int(details["generated_tokens"]))
    return Event("token" in event, event.get("generated_text") is not None, counts)


def read_openai(event: Mapping[str, Any]) -> Event:
    """A chunk of /v1/chat/completions or /v1/completions. A delta with only a role has no text."""
    if error := event.get("error"):
        return Event(error=str(error.get("message") if isinstance(error, dict) else error))
    counts = None
    if usage := event.get("usage"):
        counts = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    has_text = is_last = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        has_text |= bool(choice.get("text")) or any(delta.get(name) for name in _TEXTS)
        is_last |= choice.get("finish_reason") is not None
    return Event(has_text, is_last, counts)


APIS = {
    "tgi": Api("/generate_stream", _tgi_body, read_tgi),
    "openai-completions": Api("/v1/completions", _openai_body, read_openai),
    "openai-chat": Api("/v1/chat/completions", _chat_body, read_openai),
}


class Stream:
    """One request and its streamed answer; reading never raises, and stops at a failure.

    Times are those of time.perf_counter. `times` are the arrivals of events with text, `last_s` is
    that of the generation's last event.
    """

    def __init__(
        self, read: Callable[[Mapping[str, Any]], Event], due_s: float | None = None
    ) -> None:
        """It is sent now; `due_s`: when the request was due, if that was earlier."""
        self.sent_s = self.ended_s = self.last_s = time.perf_counter()
        self.due_s = self.sent_s if due_s is None else due_s
        self.times = array("d")
        self.counts: tuple[int, int] | None = None
        """(prompt tokens, generated tokens), if the server reported them."""
        self.failure: tuple[str, str] | None = None
        """(kind, message)."""
        self.num_events = 0
        self._is_finished = False
        self._read = read
        self._pending = b""
        self._data: list[bytes] = []

    @property
    def output_tokens(self) -> int:
        """As the server counts, else the number of events with text."""
        return len(self.times) if self.counts is None else self.counts[1]

    @property
    def time_per_token(self) -> float | None:
        """From the first token to the last, per token after the first."""
        behind_first = self.output_tokens - 1
        if not self.times or behind_first < 1:
            return None
        return (self.last_s - self.times[0]) / behind_first

    def feed(self, data: bytes, arrived: float) -> None:
        """Reads bytes that arrived at this time; an empty line ends an event."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and not line.strip():
                text = b"\n".join(self._data)
                self._data.clear()
                if self.failure is None:
                    self._end_event(text, arrived)

    def end(self, ended_s: float) -> None:
        """The answer has ended; some servers omit the last empty line."""
        self.feed(b"\n\n", ended_s)
        self.ended_s = ended_s
        if not self._is_finished:
            self.fail("cut stream", "the stream ended without its last event", ended_s)

    def fail(self, kind: str, message: str, ended_s: float) -> None:
        """The request has failed, unless it had before; its message is kept as one short line."""
        self.ended_s = ended_s
        if self.failure is None:
            self.failure = (kind, " ".join(message.split())[:300])

    def _end_event(self, data: bytes, arrived: float) -> None:
        self.num_events += 1
        if data == b"[DONE]":
            self._is_finished = True
            return
        try:
            event = self._read(orjson.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError):
            text = data[:200].decode(errors="replace")
            self.fail("bad event", f"not a valid event: {text}", arrived)
            return
        if event.error is not None:
            self.fail("error event", event.error, arrived)
        if event.has_text:
            self.times.append(arrived)
        if event.has_text or event.is_last:
            self.last_s = arrived
        self.counts = event.counts or self.counts
        self._is_finished |= event.is_last


def message_of(body: bytes) -> str:
    """The message in the body of an error, or the whole body."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace") or "nothing"
