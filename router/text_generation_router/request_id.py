"""Each HTTP request has an id: its answer bears it, and so do the log lines about it."""

import re
from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import quote
from uuid import uuid4

from starlette.types import Message, Scope, Send

# A client's own id is kept if it can stand in a header and a log line.
_GOOD = re.compile(rb"[\w.:-]{1,128}")
_HEADER = b"x-request-id"
_SHOWN_PATH = 128
# Anthropic's clients look for another one; wherever they ask, they send their version.
_ANTHROPIC_PATH, _ANTHROPIC_HEADER = "/v1/messages", b"request-id"
_ANTHROPIC_VERSION = b"anthropic-version"


class RequestName(NamedTuple):
    """What log lines say of a request."""

    route: str
    request_id: str


_CURRENT: ContextVar[RequestName | None] = ContextVar("request", default=None)


def current() -> RequestName | None:
    """The request that this task answers; None: none."""
    return _CURRENT.get()


def named(scope: Scope, send: Send) -> Send:
    """The same `send`, which puts the id of this request into the head of its answer. From here on
    it is the task's current one."""
    sent = dict(scope["headers"])
    given = sent.get(_HEADER, b"")
    request_id = given if _GOOD.fullmatch(given) else uuid4().hex.encode()
    # As it is written in a URL: in one line.
    _CURRENT.set(RequestName(quote(scope["path"][:_SHOWN_PATH]), request_id.decode()))
    headers = [(_HEADER, request_id)]
    if scope["path"].startswith(_ANTHROPIC_PATH) or _ANTHROPIC_VERSION in sent:
        headers.append((_ANTHROPIC_HEADER, request_id))

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_named
