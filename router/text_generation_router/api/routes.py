"""What routes share: API keys, how a body is read, the end when a client leaves, services, HEAD for
GET."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from text_generation_router.api.body import BodyError, Parser, media_type, parsed, read_body
from text_generation_router.api.errors import Responses
from text_generation_router.api.sse import disconnected
from text_generation_router.edge.keys import NEEDS_KEY, check_key
from text_generation_router.request_options import NO_OPTIONS, options_of, read_options
from text_generation_router.services import Services


def events(description: str, event: type[BaseModel] | None = None) -> Responses:
    """The documentation of a stream of events, instead of JSON or beside it."""
    content = {}
    if event is not None:
        content = {"schema": {"$ref": f"#/components/schemas/{event.__name__}"}}
    return {200: {"description": description, "content": {"text/event-stream": content}}}


class _ReadRequest(Request):
    """A request whose body is read. To FastAPI the body is JSON, which it need not parse."""

    def __init__(self, scope: Scope, receive: Receive, value: Any) -> None:
        super().__init__(scope, receive)
        self._headers = Headers(raw=[(b"content-type", b"application/json"), *scope["headers"]])
        self._body, self._json = b"read", value


class JsonRoute(APIRoute):
    """A POST route behind the API keys, whose body is JSON of at most `payload_limit` bytes.

    The key is checked first, then the headers that set the options of the request, then the body.
    FastAPI alone would read the body before it calls any dependency. The route function is
    cancelled when the client leaves.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Raises HTTPException, RouterError and RequestValidationError."""
        handler = super().get_route_handler()
        field = self.body_field
        assert field is not None

        async def reading(request: Request) -> Response:
            check_key(request.scope)
            deadline = read_options(request.scope).deadline
            bounds = nullcontext if deadline is None else deadline.bounds
            async with bounds():
                value = await read_body(request, field.validate, self.parser(request.headers))
            read = _ReadRequest(request.scope, request.receive, value)

            async def answer() -> Response:
                # In the task itself, which a deadline in its last step can not interrupt.
                async with bounds():
                    return await handler(read)

            return await _unless_disconnected(request, answer())

        return reading

    def parser(self, headers: Headers) -> Parser:
        """The function that parses the body. Raises BodyError unless the body is called JSON."""
        main, _, sub = media_type(headers).partition("/")
        if main != "application" or not (sub == "json" or sub.endswith("+json")):
            raise BodyError(415, "Expected request with `Content-Type: application/json`")
        return parsed


def post_router(tag: str, errors: Responses, route_class: type[JsonRoute] = JsonRoute) -> APIRouter:
    """A router of POST routes behind the API keys, which fail as `errors` says."""
    return APIRouter(route_class=route_class, dependencies=NEEDS_KEY, tags=[tag], responses=errors)


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


async def services_of(request: Request) -> Services:
    """The services of the app, with the options of this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    request_options = options_of(request.scope)
    return services if request_options is NO_OPTIONS else replace(services, options=request_options)


ServicesDependency = Annotated[Services, Depends(services_of)]


def get(router: APIRouter, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """A GET route that answers HEAD as well, as TGI's do."""

    def register(handler: Handler) -> Handler:
        router.add_api_route(path, handler, methods=["GET"], **options)
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        return handler

    return register


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
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
