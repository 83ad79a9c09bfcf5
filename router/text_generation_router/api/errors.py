"""The errors of every route: in the words of OpenAI, and as TGI and OpenAI write them.

A wrong request of a /v1 route is 400, as at OpenAI, independent of the layer that found it, so that
clients raise their typed exceptions. TGI's 422 and 424 do not leave these routes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from text_generation_router.api.body import BodyError, complaint_of, shape_error, short
from text_generation_router.errors import (
    BadRequestError,
    ContextLengthError,
    GrammarError,
    GrammarFailedError,
    RouterError,
    ValidationError,
)

Responses = dict[int | str, dict[str, Any]]
"""What a route may answer, for the documentation."""

BUG = "The server failed on this request; its log says why"
_BACKTICKED = re.compile(r"`(\w+)`")
# OpenAI's names of the parameters in the errors of validation.py.
_VLLMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "truncate": "truncate_prompt_tokens",
}
_NAMES: dict[str, dict[str, str]] = {
    "/v1/completions": _VLLMS | {"inputs": "prompt", "top_n_tokens": "logprobs"},
    "/v1/chat/completions": _VLLMS
    | {"inputs": "messages", "top_n_tokens": "top_logprobs", "grammar": "response_format"},
    "/v1/embeddings": _VLLMS | {"inputs": "input"},
    "/v1/score": {"inputs": "text_2"},
    "/v1/rerank": {"inputs": "documents"},
    "/v1/responses": {
        "inputs": "input",
        "max_new_tokens": "max_output_tokens",
        "top_n_tokens": "top_logprobs",
        "grammar": "text",
        "response_format": "text",
    },
    "/v1/messages": {
        "inputs": "messages",
        "max_new_tokens": "max_tokens",
        "stop": "stop_sequences",
        "grammar": "output_config",
        "response_format": "output_config",
    },
}
# The type and the code of a status; of others see `describe`.
_KINDS: dict[int, tuple[str, str]] = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "unknown_url"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    504: ("timeout", "timeout"),
}


class ErrorResponse(BaseModel):
    """Body of every error."""

    error: str = Field(description="What was wrong, in a sentence.")
    error_type: str = Field(description="The kind of the error, in a word.")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What was wrong, in a sentence.")
    type: str = Field(description="The kind of the error.")
    param: str | None = Field(
        description="The field of the body that was wrong, with dots in its path."
    )
    code: str | None = Field(description="The exact error, in a word.")


class ErrorBody(BaseModel):
    """Body of every error of OpenAI's routes, and of an event that ends a stream."""

    error: ErrorDetail = Field(description="The error.")


class RequestError(BadRequestError):
    """A request that one of OpenAI's routes can not serve; `param` names the field at fault."""

    status_code = 400
    error_type = "invalid_request_error"

    def __init__(self, sentence: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param
        self.code = code


class ModelNotFoundError(RequestError):
    """The request is for a model that is not served here."""

    status_code = 404

    def __init__(self, given: str, served: str) -> None:
        super().__init__(
            f"The model {given[:128]!r} is not served here; this server has {served!r}; send that "
            "or `tgi` as `model`",
            "model",
            "model_not_found",
        )


_COMMON = {
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body does not say that it is JSON",
    429: "Model is overloaded",
    503: "The server is busy, has had no turn for the request in time, or is being stopped",
    504: "The answer has not ended in time",
}
_TGIS = {
    400: "The body is not JSON",
    404: "The adapter is not served",
    422: "Input validation error",
    424: "Generation error",
    500: "Incomplete generation",
}
_OPENAIS = {
    400: "The request is wrong",
    401: "The API key is missing or wrong",
    404: "The model is not served",
    500: "The generation failed",
}
UNAUTHORIZED: Responses = {
    401: {"description": "The API key is missing or wrong; the body is empty"}
}
STATUSES: Responses = {
    status: {"description": told} for status, told in sorted((_OPENAIS | _COMMON).items())
}
"""The statuses of errors, for the documentation of dialects with bodies of their own."""
# Keeps FastAPI from writing down a 422, which these routes do not have.
STATUSES["4XX"] = {"description": "Whatever else is wrong with the request"}
OPENAI_ERRORS = {status: told | {"model": ErrorBody} for status, told in STATUSES.items()}
TGI_ERRORS = UNAUTHORIZED | {
    status: {"description": told, "model": ErrorResponse}
    for status, told in sorted((_TGIS | _COMMON).items())
}


def respond_as_tgi(request: Request, error: Exception) -> Response:
    """A JSON body for every error but 401, 404 and 405 of the framework, which are empty."""
    if isinstance(error, HTTPException) and not isinstance(error, BodyError):
        return Response(status_code=error.status_code, headers=error.headers)
    kind = "validation"
    if isinstance(error, RouterError):
        status, sentence, kind = error.status_code, error.message, error.error_type
    elif isinstance(error, RequestValidationError):
        status, sentence = 422, shape_error(error.errors())
    elif isinstance(error, BodyError):
        status, sentence = error.status_code, error.detail
    else:
        status, sentence, kind = 500, BUG, "internal"
    return error_answer({"error": sentence, "error_type": kind}, status, error)


def respond_as_openai(request: Request, error: Exception) -> Response:
    """The answer to a request that failed; `error` is anything a route or the framework raised."""
    status, detail = describe(error, request.url.path, request.method)
    return error_answer({"error": detail}, status, error)


def error_answer(body: dict[str, Any], status: int, error: Exception) -> Response:
    """The body with the headers of the error."""
    headers = error.headers if isinstance(error, HTTPException | RouterError) else None
    return JSONResponse(body, status, headers)


def describe(error: Exception, path: str, method: str = "POST") -> tuple[int, dict[str, Any]]:
    """The status and the `error` object for a failure on the route at `path`."""
    param: str | None = None
    code: str | None = None
    if isinstance(error, RequestError):
        status, message, param, code = error.status_code, str(error), error.param, error.code
    elif isinstance(error, ContextLengthError) and path in _NAMES:
        status, code, param = 400, "context_length_exceeded", _NAMES[path]["inputs"]
        message = _context_complaint(error, param)
    elif isinstance(error, RouterError):
        status = {422: 400, 424: 500}.get(error.status_code, error.status_code)
        if isinstance(error, GrammarFailedError):
            status = 400
        # Without TGI's prefix.
        message = str(error) if isinstance(error, ValidationError) else error.message
        if status < 429:
            message, param = _in_openai_words(message, path)
            if isinstance(error, GrammarError):
                param = _NAMES.get(path, {}).get("grammar")
    elif isinstance(error, RequestValidationError):
        status = 400
        message, param = shape_complaint(error.errors(), error.body)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
        if status == 404:
            message = f"There is no {method} {path[:128]} on this server"
        elif status == 405:
            message = f"{path[:128]} does not take {method}"
        elif status == 422:
            status = 400
    else:
        status, message = 500, BUG
    other = ("server_error" if status >= 500 else "invalid_request_error", None)
    kind, usual_code = _KINDS.get(status, other)
    return status, {"message": message, "type": kind, "param": param, "code": code or usual_code}


def _context_complaint(error: ContextLengthError, prompt: str) -> str:
    """OpenAI's sentence, which vLLM and most clients know; `prompt`: the field that has it.

    Clients ask again for what the first number leaves to the second. Where only the limit of
    prompts is exceeded, the first number is therefore that limit.
    """
    if error.is_total_exceeded:
        total = error.num_prompt_tokens + error.max_new_tokens
        return (
            f"This model's maximum context length is {error.max_total_tokens} tokens. However, you "
            f"requested {total} tokens ({error.num_prompt_tokens} in the messages, "
            f"{error.max_new_tokens} in the completion). Please reduce the length of the messages "
            "or completion."
        )
    return (
        f"This model's maximum context length is {error.max_input_tokens} tokens. However, your "
        f"{prompt} resulted in {error.num_prompt_tokens} tokens. Please reduce the length of the "
        f"{prompt}."
    )


def shape_complaint(errors: Sequence[Any], body: Any) -> tuple[str, str | None]:
    """The sentence and the dotted field for JSON of the wrong shape."""
    path, first = furthest(errors, body)
    param = ".".join(map(short, path)) or None
    complaint = complaint_of(first)
    return f"`{param}`: {complaint}" if param else complaint, param


def furthest(errors: Sequence[Any], body: Any, has_types: bool = False) -> tuple[list[str], Any]:
    """The path and the error of the form that fits furthest: where a field has several forms,
    pydantic reports each. `has_types`: the path names the types of objects, too."""
    located = [(_path_in(body, error, has_types), error) for error in errors]
    return max(located, key=lambda pair: len(pair[0]))


def _path_in(body: Any, error: Mapping[str, Any], has_types: bool) -> list[str]:
    """The parts of an error's location that are keys of the body, including a missing field; of
    the others, which name pydantic's types, only the `type` of an object may stay."""
    path: list[str] = []
    for part in error["loc"][1:]:
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        is_type = has_types and isinstance(body, dict) and body.get("type") == part
        # The type stands before a key of the same name.
        if is_type and path[-1:] != [part]:
            pass
        elif is_index or (isinstance(body, dict) and part in body):
            body = body[part]
        elif not (error["type"] == "missing" and part == error["loc"][-1]):
            continue
        path.append(str(part))
    return path


def _in_openai_words(sentence: str, path: str) -> tuple[str, str | None]:
    """A sentence with OpenAI's names of the parameters, and the first of them."""
    names = _NAMES.get(path, {})
    sentence = _BACKTICKED.sub(lambda match: f"`{names.get(match[1], match[1])}`", sentence)
    first = _BACKTICKED.search(sentence)
    return sentence, None if first is None else first[1]
