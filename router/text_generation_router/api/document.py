"""The OpenAPI document: what FastAPI makes of the routes, with examples and with the API keys."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI

from text_generation_router.api.examples import BODIES, PARAMETERS
from text_generation_router.api.keys import KeyRoute

Json = dict[str, Any]

# The check of the keys takes both on every route.
SECURITY_SCHEMES: dict[str, Json] = {
    "HTTPBearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key of this server, as OpenAI's clients send it.",
    },
    "APIKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "An API key of this server, as Anthropic's clients send it. "
        "One of the two headers is enough.",
    },
}
# How FastAPI's own 422 looks, which no route here answers with.
_FOREIGN_ERRORS = ("HTTPValidationError", "ValidationError")


def complete_openapi(app: FastAPI, routers: Iterable[APIRouter], are_keys_asked_for: bool) -> None:
    """Has `app.openapi()` give examples, name only errors that are answered, and name the keys on
    the routes that ask for one.

    Without keys it names none. The document is made once, when it is first asked for.
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
        for name in _FOREIGN_ERRORS:
            document["components"]["schemas"].pop(name, None)
        if are_keys_asked_for:
            document["components"]["securitySchemes"] = SECURITY_SCHEMES
            for path, method in _behind_keys(routers):
                paths[path][method]["security"] = [{name: []} for name in SECURITY_SCHEMES]
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


def _behind_keys(routers: Iterable[APIRouter]) -> Iterator[tuple[str, str]]:
    """Path and method of the documented routes that ask for a key."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, KeyRoute) and route.include_in_schema:
                for method in route.methods or ():
                    yield route.path_format, method.lower()
