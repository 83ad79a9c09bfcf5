"""The OpenAPI document: FastAPI's own, with examples and the headers of terms."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.examples import BODIES, PARAMETERS
from text_generation_router.api.terms import MOST_PRIORITY

Json = dict[str, Any]

# Of `terms.py`, on the routes that read them.
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
# How FastAPI's own 422 looks, which no route here answers with.
_FOREIGN_ERRORS = ("HTTPValidationError", "ValidationError")


def complete_openapi(app: FastAPI, routers: Iterable[APIRouter], are_keys_asked_for: bool) -> None:
    """Adds examples and the headers of terms to `app.openapi()`. Removes FastAPI's own errors, and
    the security schemes of a server without keys.

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
                _drop_foreign_error(operation)
                if not are_keys_asked_for:
                    operation.pop("security", None)
        if not are_keys_asked_for:
            document["components"].pop("securitySchemes", None)
        for path, method in _documented(routers):
            headers = [_TIMEOUT_HEADER]
            if path not in _NOT_QUEUED:
                headers.append(_PRIORITY_HEADER)
            paths[path][method].setdefault("parameters", []).extend(headers)
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


def _drop_foreign_error(operation: Json) -> None:
    """FastAPI names its own 422 wherever a route does not name one."""
    content = operation["responses"].get("422", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").rpartition("/")[2] in _FOREIGN_ERRORS:
        del operation["responses"]["422"]


def _documented(routers: Iterable[APIRouter]) -> Iterator[tuple[str, str]]:
    """Path and method of the documented routes that read the headers of terms."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, JsonRoute) and route.include_in_schema:
                for method in route.methods or ():
                    yield route.path_format, method.lower()
