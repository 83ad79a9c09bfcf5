"""The OpenAPI document: FastAPI's own, with examples and the headers of request options."""

from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

from fastapi import APIRouter, FastAPI

from text_generation_router.api.routes import JsonRoute
from text_generation_router.request_options import MOST_PRIORITY

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
