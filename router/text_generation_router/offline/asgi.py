"""Requests to the application without a socket between."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status_code: int
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """What the application answers to JSON that is posted to one of its paths.

    Raises what the application raises where it could not answer at all.
    """
    asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status_code = 500
    pieces: list[bytes] = []

    async def receive() -> Message:
        if not asked:
            await asyncio.Event().wait()  # a client that stays: routes ask whether it left
        return asked.pop()

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
