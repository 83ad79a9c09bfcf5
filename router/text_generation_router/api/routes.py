"""What routes share: API keys, how a body is read, the end when a client leaves, services, HEAD for
GET; and their OpenAPI document: FastAPI's own, with examples and the headers of request options."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from text_generation_router.api.answers import disconnected
from text_generation_router.api.body import BodyError, Parser, media_type, parsed, read_body
from text_generation_router.api.errors import Responses
from text_generation_router.edge.keys import NEEDS_KEY, check_key
from text_generation_router.request_options import (
    MOST_PRIORITY,
    NO_OPTIONS,
    options_of,
    read_options,
)
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


Json = dict[str, Any]

_QUESTION = "What does textwrap.dedent do?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_DOCUMENTS = ["Remove any common leading whitespace from every line.", "Wrap a paragraph."]
_SHORT: Json = {"max_new_tokens": 60}
_GENERATE: Json = {"inputs": _QUESTION, "parameters": _SHORT}
_COUNTED: Json = {"model": "tgi", "messages": _MESSAGES}
_CHAT: Json = _COUNTED | {"max_tokens": 100, "temperature": 0}
_COMPLETION: Json = {"model": "tgi", "prompt": _QUESTION, "max_tokens": 60, "temperature": 0}
_RESPONSE: Json = {"model": "tgi", "input": _QUESTION, "max_output_tokens": 100, "temperature": 0}
_VERSION: Json = {
    "inputs": "Which version of Python is this?",
    "parameters": {"max_new_tokens": 20, "grammar": {"type": "regex", "value": "3\\.[0-9]{1,2}"}},
}
_SCHEMA: Json = {
    "type": "object",
    "properties": {"function": {"type": "string"}, "is_useful": {"type": "boolean"}},
    "required": ["function", "is_useful"],
}
_JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
_TENSOR = {"name": "prompt", "shape": [1, len(_QUESTION)], "datatype": "UINT8"}
_TEXTS = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": [_QUESTION, "Hello"]}
_SCORE = {"Two pairs": {"model": "tgi", "text_1": _QUESTION, "text_2": _DOCUMENTS}}
_RANK = {"Two documents": {"model": "tgi", "query": _QUESTION, "documents": _DOCUMENTS}}
_STREAM = {"stream": True}
_A_STREAM = "A stream of events"

BODIES: dict[str, dict[str, Json]] = {
    "/": {"A prompt": _GENERATE, _A_STREAM: _GENERATE | _STREAM},
    "/generate": {"A prompt": _GENERATE, "A text that matches a regular expression": _VERSION},
    "/generate_stream": {"A prompt": _GENERATE},
    "/tokenize": {"A text": {"inputs": _QUESTION}},
    "/chat_tokenize": {"A chat": {"messages": _MESSAGES}},
    "/invocations": {
        "A prompt, as / takes it": _GENERATE,
        "A chat, as /v1/chat/completions takes it": _CHAT,
        "A prompt, as /v1/completions takes it": _COMPLETION,
    },
    "/vertex": {
        "A prompt": {"instances": [_GENERATE]},
        "A prompt and a chat": {"instances": [_GENERATE, _CHAT]},
    },
    "/v1/embeddings": {"Two texts": {"model": "tgi", "input": _DOCUMENTS}},
    **dict.fromkeys(("/score", "/v1/score"), _SCORE),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANK),
    "/v1/completions": {"A prompt": _COMPLETION, _A_STREAM: _COMPLETION | _STREAM},
    "/v1/chat/completions": {
        "A question": _CHAT,
        _A_STREAM: _CHAT | _STREAM,
        "JSON that follows a schema": _CHAT | {"response_format": _JSON_FORMAT},
    },
    "/v1/responses": {"A question": _RESPONSE, _A_STREAM: _RESPONSE | _STREAM},
    "/v1/messages": {"A question": _CHAT, _A_STREAM: _CHAT | _STREAM},
    "/v1/messages/count_tokens": {"A question": _COUNTED},
    "/v2/models/{model_name}/infer": {"Texts": {"inputs": [_TEXTS], "parameters": _SHORT}},
    "/v2/models/{model_name}/versions/{model_version}/infer": {
        "A prompt": {
            "id": "1",
            "inputs": [_TENSOR | {"data": list(_QUESTION.encode())}],
            "outputs": [{"name": "text"}],
            "parameters": _SHORT,
        }
    },
}
"""Path → the name of an example → the body."""

PARAMETERS: dict[str, tuple[str, str]] = {
    "model": ("tgi", "A name of the served model. It may contain slashes."),
    "model_name": ("tgi", "Any name: the server has one model."),
    "model_version": ("1", "Any version: the server has one model."),
}
"""The name of a path's parameter → a value that works, and its description."""

# Of `request_options.py`, on the routes that read them.
_TIMEOUT_HEADER: Json = {
    "name": "X-Request-Timeout",
    "in": "header",
    "required": False,
    "description": "Seconds from the arrival of the request to the end of its answer; then it is "
    "answered 504, and a stream ends with an error. The smaller of it and --request-timeout "
    "counts.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_PRIORITY_HEADER: Json = {
    "name": "X-Priority",
    "in": "header",
    "required": False,
    "description": "Requests of a higher priority have their turn first, and among equals those "
    "that came first. Default: 0, or what `service_tier` or `priority` of the body say.",
    "schema": {"type": "integer", "minimum": -MOST_PRIORITY, "maximum": MOST_PRIORITY},
}
# Nothing of them waits for a turn.
_NOT_QUEUED = ("/tokenize", "/chat_tokenize", "/v1/messages/count_tokens")
# Of FastAPI's own 422, which no route here answers with.
_FOREIGN_ERRORS = ("HTTPValidationError", "ValidationError")


def complete_openapi(app: FastAPI, routers: Iterable[APIRouter], are_keys_asked_for: bool) -> None:
    """Adds examples and the headers of request options to `app.openapi()`. Removes FastAPI's own
    errors, and the security schemes of a server without keys.

    The document is made once, at the first request for it.
    """
    make = app.openapi

    @cache
    def openapi() -> Json:
        document = make()
        paths: dict[str, dict[str, Json]] = document["paths"]
        for path, operations in paths.items():
            for method, operation in operations.items():
                _add_examples(path, method, operation)
                # FastAPI names its own 422 wherever a route does not name one.
                if any(name in str(operation["responses"].get("422")) for name in _FOREIGN_ERRORS):
                    del operation["responses"]["422"]
                if not are_keys_asked_for:
                    operation.pop("security", None)
        if not are_keys_asked_for:
            document["components"].pop("securitySchemes", None)
        for route in chain.from_iterable(router.routes for router in routers):
            if isinstance(route, JsonRoute) and route.include_in_schema:
                headers = [_TIMEOUT_HEADER]
                if route.path_format not in _NOT_QUEUED:
                    headers.append(_PRIORITY_HEADER)
                paths[route.path_format]["post"].setdefault("parameters", []).extend(headers)
        for name in _FOREIGN_ERRORS:
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it


def _add_examples(path: str, method: str, operation: Json) -> None:
    if method == "post" and path in BODIES:
        operation["requestBody"]["content"]["application/json"]["examples"] = {
            name: {"summary": name, "value": body} for name, body in BODIES[path].items()
        }
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path" and parameter["name"] in PARAMETERS:
            parameter["example"], parameter["description"] = PARAMETERS[parameter["name"]]
