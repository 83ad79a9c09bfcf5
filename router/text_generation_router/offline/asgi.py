"""Requests to the application without a socket."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status_code: int
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """The application's answer to a POST of JSON. Raises what the application raises."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status_code = 500
    pieces: list[bytes] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # the client never disconnects
        return messages.pop()

    async def send(message: Message) -> None:
        nonlocal status_code
        if message["type"] == "http.response.start":
            status_code = message["status"]
        else:
            pieces.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": ("localhost", 80),
    }
    await app(scope, receive, send)
    return Answer(status_code, b"".join(pieces))
