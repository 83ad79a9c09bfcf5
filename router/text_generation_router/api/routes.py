"""What route functions share: their services, HEAD for GET, and the end when a client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.errors import Responses
from text_generation_router.api.keys import NEEDS_KEY, caller_of
from text_generation_router.api.sse import (
    COMMENT,
    EventStream,
    LastEvent,
    disconnected,
    last_event,
)
from text_generation_router.request_id import TRACE
from text_generation_router.request_options import options_of
from text_generation_router.services import Services


def events(description: str, event: type[BaseModel] | None = None) -> Responses:
    """The documentation of a stream of events, instead of JSON or beside it."""
    content = {}
    if event is not None:
        content = {"schema": {"$ref": f"#/components/schemas/{event.__name__}"}}
    return {200: {"description": description, "content": {"text/event-stream": content}}}


def post_router(tag: str, errors: Responses, route_class: type[JsonRoute] = JsonRoute) -> APIRouter:
    """A router of POST routes behind the API keys, which fail as `errors` says."""
    return APIRouter(route_class=route_class, dependencies=NEEDS_KEY, tags=[tag], responses=errors)


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


async def services_of(request: Request) -> Services:
    """The services of the app, on behalf of the caller of this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    scope = request.scope
    return services.on_behalf_of(caller_of(scope), options_of(scope), scope.get(TRACE))


ServicesDependency = Annotated[Services, Depends(services_of)]


def get(router: APIRouter, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """A GET route that answers HEAD as well, as TGI's do."""

    def register(handler: Handler) -> Handler:
        router.add_api_route(path, handler, methods=["GET"], **options)
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        return handler

    return register


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
        if isinstance(error, HTTPException) or has_status(error):
            raise
        first = last_event(error, failed)
    return EventStream(chunks, headers, failed, keep_alive, first)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Raises HTTPException 499, and cancels it, if the client leaves."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "The client has left")
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
