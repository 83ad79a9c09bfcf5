"""Answers to HTTP/1.0, which knows no chunks: one without a length ends with the connection."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The same application for one request of HTTP/1.0. uvicorn closes the connection behind it."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                has_length = b"content-length" in names
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # What uvicorn expects is what comes.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return run
