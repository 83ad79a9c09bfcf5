"""Answers in HTTP/1.0, which has no chunks: closing the connection ends one without a length."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for one HTTP/1.0 request. uvicorn closes the connection after it."""

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
                # uvicorn checks the length that it expects; here any length is valid.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return run
