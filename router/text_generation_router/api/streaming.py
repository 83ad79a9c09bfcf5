"""What all streams and all long answers share: their start, and their end when a client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response

from text_generation_router.api.sse import (
    COMMENT,
    EventStream,
    LastEvent,
    disconnected,
    last_event,
)

Result = TypeVar("Result")


async def open_stream(
    request: Request,
    chunks: AsyncGenerator[bytes],
    headers: Mapping[str, str],
    failed: LastEvent,
    keep_alive: bytes = COMMENT,
    has_status: Callable[[Exception], bool] = lambda error: True,
) -> Response:
    """The response that sends `chunks`, of which the first, which may be empty, is awaited here.

    An error before it is raised, and so answered with a status, if `has_status` says so. Every
    other error becomes the last event, which `failed` writes.
    """
    try:
        first = await unless_disconnected(request, anext(chunks))
    except Exception as error:
        if has_status(error):
            raise
        first = last_event(error, failed)
    if first is None:
        return Response(status_code=499)
    return EventStream(chunks, headers, failed, keep_alive, first)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None after cancelling it because the client left."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
