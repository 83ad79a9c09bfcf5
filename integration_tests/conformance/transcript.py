"""Golden transcripts: requests, and their expected responses with the volatile parts masked.

A file of `transcripts/` holds the conversations with one route, name → request and response:

    "greedy": {
      "request": {"path": "/generate", "json": {"inputs": "a"}},
      "response": {"status": 200, "headers": {…}, "json": {…}}
    }

A request has a `path`, and a `json` or `text` body if it is a POST; `method` and `headers` only if
they are unusual (a header that is null is not sent); `padding` is a number of spaces after the
body. `is_interleaved`: events of different choices may come in any order. A response has a `json`
body, `text`, or `events` if it is a stream; `volatile_headers` must be present, with any value.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

API_KEY = "secret"
SERVER_FLAGS = (
    *("--device", "cpu", "--dtype", "float32"),  # greedy answers that are the same everywhere
    *("--api-key", API_KEY),
    *("--max-batch-total-tokens", "8192"),  # not what the machine's memory allows
    *("--max-input-tokens", "600"),
)
LINE_WIDTH = 150
FLOAT_TOLERANCE = 2e-3

_GENERATED_ID = re.compile(r"^([a-z]+[-_])?[0-9A-Za-z_-]{8,}$")
_ID_KEYS = {
    *("id", "item_id", "response_id", "request_id"),
    *("tool_call_id", "tool_use_id", "call_id"),
}
_TIME_KEYS = {"created", "created_at", "completed_at"}
_CACHE_KEYS = {"cached_tokens", "cache_read_input_tokens"}  # depend on what was asked before
_VERSION_KEYS = {"version", "system_fingerprint"}
# uvicorn's headers, and those of every answer.
_UNSHOWN = {"date", "connection", "content-length", "transfer-encoding", "x-request-id"}
_VOLATILE_HEADER = re.compile(r"^x-.*-time$|^x-time-per-token$|-processing-ms$|^request-id$")


def send(client: httpx.Client, request: Mapping[str, Any]) -> httpx.Response:
    """Sends a transcript's request, with the API key unless its headers say otherwise."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    content = None
    if "json" in request:
        content = json.dumps(request["json"]).encode()
    elif "text" in request:
        content = request["text"].encode()
    if content is not None:
        content += b" " * request.get("padding", 0)
        headers["content-type"] = "application/json"
    headers |= request.get("headers", {})
    return client.request(
        request.get("method", "GET" if content is None else "POST"),
        request["path"],
        content=content,
        headers={name: value for name, value in headers.items() if value is not None},
    )


def transcribe(response: httpx.Response) -> dict[str, Any]:
    """The response as a transcript keeps it, masked."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    headers = {name: value for name, value in response.headers.items() if name not in _UNSHOWN}
    volatile = sorted(filter(_VOLATILE_HEADER.search, headers))
    answer: dict[str, Any] = {
        "status": response.status_code,
        "headers": {name: headers[name] for name in sorted(headers) if name not in volatile},
    }
    if volatile:
        answer["volatile_headers"] = volatile
    if kind == "text/event-stream":
        answer["events"] = [_masked(event) for event in _events_of(response.text)]
    elif kind == "application/json":
        body = response.json()
        is_schema = isinstance(body, dict) and "openapi" in body  # has a frozen copy of its own
        answer["json"] = sorted(body["paths"]) if is_schema else _masked(body)
    elif response.text:
        answer["text"] = _shown_text(response.text, kind)
    return answer


def sorted_by_choice(events: list[Any]) -> list[Any]:
    """Interleaved events of several sequences, sorted by sequence."""

    def place(event: Any) -> int:
        choices = event.get("choices") if isinstance(event, dict) else None
        return choices[0]["index"] if choices else 1_000

    return sorted(events, key=place)


def settle(answer: Any, expected: Any) -> Any:
    """The answer, with floats that are as good as the expected ones replaced by those.

    Other processors round the last digits of a logprob differently.
    """
    if isinstance(answer, dict) and isinstance(expected, dict):
        return {key: settle(value, expected.get(key)) for key, value in answer.items()}
    if isinstance(answer, list) and isinstance(expected, list) and len(answer) == len(expected):
        return [settle(one, other) for one, other in zip(answer, expected, strict=True)]
    if isinstance(answer, float) and isinstance(expected, float):
        return expected if abs(answer - expected) <= FLOAT_TOLERANCE else answer
    return answer


def read(path: Path) -> dict[str, Any]:
    """All transcripts of a file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, transcripts: Mapping[str, Any]) -> None:
    """The counterpart of `read`: values that fit on a line stay on one."""
    path.write_text(pretty(transcripts) + "\n")


def pretty(value: Any, indent: str = "") -> str:
    """JSON in which a value that fits on a line stays on one; keys keep their order."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= LINE_WIDTH or not value or not isinstance(value, dict | list):
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {pretty(part, deeper)}"
            for key, part in value.items()
        ]
    else:
        parts = [pretty(part, deeper) for part in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{closing}"


def _events_of(text: str) -> list[Any]:
    """A stream's events: JSON data as it is; with its name if it has one; other data as text.

    Asserts the form that TGI's and OpenAI's clients were written against: one `data: ` line an
    event, nothing else but its name, an empty line after each, the last one included.
    """
    assert text.endswith("\n\n") and "\r" not in text, f"the stream ends with {text[-40:]!r}"
    events: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block == ":":  # keep-alive
            continue
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(lines) in ({"data"}, {"event", "data"}), block
        try:
            data = json.loads(lines["data"])
        except ValueError:
            data = lines["data"]
        events.append({"event": lines["event"], "data": data} if "event" in lines else data)
    return events


def _shown_text(text: str, kind: str) -> str | list[str]:
    """The title of a page, or the metrics of Prometheus' format with their types."""
    if kind == "text/html":
        return text.partition("<title>")[2].partition("</title>")[0].strip()
    if text.startswith("# HELP "):
        return sorted(line for line in text.splitlines() if line.startswith("# TYPE "))
    return text


def _masked(value: Any, key: str = "") -> Any:
    """The value without parts that differ between runs, versions or machines."""
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # the two together are the prompt
            length = value["input_tokens"] + value["cache_read_input_tokens"]
            value = {**value, "input_tokens": length}
        return {name: _masked(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked(part) for part in value]
    if isinstance(value, float):
        return round(value, 4) + 0.0  # no -0.0
    if key == "seed" and isinstance(value, int) and value >= 2**32:  # drawn by the server
        return "*"
    if key in _CACHE_KEYS or (key in _TIME_KEYS and value):
        return "*"
    if key in _VERSION_KEYS and isinstance(value, str):
        return "*"
    if key in _ID_KEYS and isinstance(value, str) and "/" not in value:
        match = _GENERATED_ID.match(value)
        return f"{match[1] or ''}*" if match else value
    return value
