"""A long JSON answer, written piece by piece as its client reads it."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager

from fastapi import Response
from starlette.types import Receive, Scope, Send

from text_generation_router.api.sse import disconnected


class PieceResponse(Response):
    """Makes each piece after the previous one was sent; other tasks run in between.

    `held` is entered here, and left when the answer is sent or its client has disconnected.
    `Connection` closes the connection of a client that stops reading.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], held: AbstractContextManager[None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._pieces = pieces
        self._held = held
        held.__enter__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the answer has ended."""
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            for piece in self._pieces:
                if leaving.done():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._held.__exit__(None, None, None)
            leaving.cancel()
            await asyncio.wait((leaving,))
