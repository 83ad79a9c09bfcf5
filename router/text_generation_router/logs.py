"""Log lines of the router, and the request that a line is about: its id is in the headers of its
answer, too."""

import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import quote
from uuid import uuid4

from starlette.types import Message, Scope, Send
from text_generation_process.log import LineFormatter, Output, send_to_output

# A client's own id is used if it is safe in a header and a log line.
_GOOD = re.compile(rb"[\w.:-]{1,128}")
_HEADER = b"x-request-id"
_SHOWN_PATH = 128
TRACE = "text_generation_router.trace"
"""The scope's key of the request's `RequestTrace`, if it has one."""
# Anthropic's clients read another header. They always send their version.
_ANTHROPIC_PATH, _ANTHROPIC_HEADER = "/v1/messages", b"request-id"
_ANTHROPIC_VERSION = b"anthropic-version"


class RequestName(NamedTuple):
    """The fields of a request in log lines."""

    route: str
    request_id: str
    trace_id: str = ""


_CURRENT: ContextVar[RequestName | None] = ContextVar("request", default=None)


def current() -> RequestName | None:
    """The request that this task serves, if any."""
    return _CURRENT.get()


def request_fields() -> Mapping[str, str]:
    """What a log line of this task tells of its request."""
    request = current()
    if request is None:
        return {}
    return {name: value for name, value in request._asdict().items() if value}


def named(scope: Scope, send: Send) -> Send:
    """A `send` that adds the request's id to the headers. Makes it the task's current request."""
    sent = dict(scope["headers"])
    given = sent.get(_HEADER, b"")
    request_id = given if _GOOD.fullmatch(given) else uuid4().hex.encode()
    # Quoted, so that it is one line.
    path, trace = quote(scope["path"][:_SHOWN_PATH]), scope.get(TRACE)
    trace_id = "" if trace is None else trace.trace_id
    _CURRENT.set(RequestName(path, request_id.decode(), trace_id))
    headers = [(_HEADER, request_id)]
    if scope["path"].startswith(_ANTHROPIC_PATH) or _ANTHROPIC_VERSION in sent:
        headers.append((_ANTHROPIC_HEADER, request_id))

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_named


def configure_logs(level: str, json_output: bool) -> Output:
    """Sends every log line of this process to standard output; see `send_to_output`."""
    formatter = LineFormatter(json_output, request_fields)
    output = send_to_output(level, formatter, "text_generation_router")
    # uvicorn logs its start at INFO and failures from WARNING on.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_new)
    return output


def _is_new(record: logging.LogRecord) -> bool:
    """False for uvicorn's line about a stream that was aborted: `EventStream` has logged why."""
    return record.msg != "ASGI callable returned without completing response."
