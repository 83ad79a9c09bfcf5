"""The errors of every route as TGI, OpenAI, Anthropic and KServe write them, and of every stream.

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

from text_generation_router.api.answers import DONE, event, named_events
from text_generation_router.api.body import BodyError, complaint_of, shape_error, short
from text_generation_router.config import RouterConfig
from text_generation_router.errors import (
    BadRequestError,
    ContextLengthError,
    GrammarError,
    GrammarFailedError,
    IncompleteGenerationError,
    RouterError,
    ValidationError,
)
from text_generation_router.request_options import current

Json = dict[str, Any]
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


OPEN_INFERENCE = "text_generation_router.open_inference"
"""In the scope of a KServe request that TGI would refuse: its errors have the protocol's form."""
BLOCK_TYPE = "block_type"
"""The type of pydantic's error for a block of Anthropic's that can not be read."""
_ANTHROPICS = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def respond(request: Request, error: Exception, config: RouterConfig) -> Response:
    """The answer to a request that failed, in the form of the path's API; `error` is anything a
    route or the framework raised. In TGI's form 401, 404 and 405 of the framework have no body."""
    path = request.url.path
    if _is_tgis(request, config.aip_predict_route):
        if isinstance(error, HTTPException) and not isinstance(error, BodyError):
            return Response(status_code=error.status_code, headers=error.headers)
        status, sentence, kind = _describe_as_tgi(error)
        body: Json = {"error": sentence, "error_type": kind}
    elif is_anthropics(request):
        names = path if isinstance(error, HTTPException) else _ANTHROPICS
        status, body = _as_anthropic(error, names, request.method)
    else:
        status, detail = describe(error, path, request.method)
        body = {"error": detail["message"] if path.startswith("/v2/") else detail}
    headers = error.headers if isinstance(error, HTTPException | RouterError) else None
    return JSONResponse(body, status, headers)


def _is_tgis(request: Request, vertex_path: str | None) -> bool:
    """Whether the errors of the path have TGI's form: wherever no other API is."""
    path = request.url.path
    # Vertex's path may be below /v1/.
    if path == vertex_path or not path.startswith(("/v1/", "/v2/")):
        return True
    is_kserves = "/versions/" in path or path.startswith("/v2/health/")
    is_open = path.startswith("/v1/") or OPEN_INFERENCE in request.scope
    return path.startswith("/v2/rerank") or (is_kserves and not is_open)


def is_anthropics(request: Request) -> bool:
    """Whether the request is for one of Anthropic's routes, or for the models by a client of
    Anthropic's, which is known by its header."""
    path = request.url.path
    is_ours = path.startswith("/v1/models") and "anthropic-version" in request.headers
    return is_ours or path.startswith(_ANTHROPICS)


def end_as_tgi(error: Exception) -> bytes:
    """The last event of a failed stream."""
    if isinstance(error, IncompleteGenerationError):
        kind = "incomplete_generation_stream"
        return event({"error": "Incomplete generation stream", "error_type": kind})
    _, sentence, kind = _describe_as_tgi(error)
    return event({"error": sentence, "error_type": kind})


def end_as_openai(path: str, error: Exception) -> bytes:
    """The same in the words of the route at `path`."""
    _, detail = describe(error, path)
    return event({"error": detail}) + DONE


def end_as_anthropic(error: Exception) -> bytes:
    """The same in Anthropic's form."""
    _, body = _as_anthropic(error)
    return named_events([body])


def _describe_as_tgi(error: Exception) -> tuple[int, str, str]:
    """The status, the sentence and the kind."""
    match error:
        case RouterError():
            return error.status_code, error.message, error.error_type
        case RequestValidationError():
            return 422, shape_error(error.errors()), "validation"
        case BodyError():
            return error.status_code, error.detail, "validation"
        case _:
            return 500, BUG, "internal"


def _as_anthropic(
    error: Exception, path: str = _ANTHROPICS, method: str = "POST"
) -> tuple[int, Json]:
    """The status and the body as Anthropic writes them, so that clients raise theirs."""
    status, detail = describe(error, path, method)
    message = detail["message"]
    if isinstance(error, ContextLengthError):
        status, message = 400, _anthropic_context_complaint(error)
    elif isinstance(error, RequestValidationError):
        message = _anthropic_shape_complaint(error)
    other = "api_error" if status >= 500 else "invalid_request_error"
    request = current()
    return status, {
        "type": "error",
        "error": {"type": _ANTHROPIC_KINDS.get(status, other), "message": message},
        "request_id": None if request is None else request.request_id,
    }


def _anthropic_context_complaint(error: ContextLengthError) -> str:
    """Clients read the numbers: at the first sentence they shorten the conversation, at the second
    they ask for fewer tokens."""
    num, most = error.num_prompt_tokens, error.max_input_tokens
    if num > most:
        return f"prompt is too long: {num} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num} + {error.max_new_tokens} > "
        f"{error.max_total_tokens}, decrease input length or `max_tokens` and try again"
    )


def _anthropic_shape_complaint(error: RequestValidationError) -> str:
    """By this form clients find the block that they must leave out: the path, with the types of
    blocks in it, and what is wrong there."""
    path, first = _furthest(error.errors(), error.body, has_types=True)
    complaint = complaint_of(first)
    block = first["input"]
    if first["type"] == BLOCK_TYPE and isinstance(block, dict) and "type" in block:
        path.append(str(block["type"]))
        if block["type"] in ("image", "document"):
            complaint = "this model reads text only"
    return ": ".join(filter(None, (".".join(map(short, path)), complaint)))


def describe(error: Exception, path: str, method: str = "POST") -> tuple[int, Json]:
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
    path, first = _furthest(errors, body)
    param = ".".join(map(short, path)) or None
    complaint = complaint_of(first)
    return f"`{param}`: {complaint}" if param else complaint, param


def _furthest(errors: Sequence[Any], body: Any, has_types: bool = False) -> tuple[list[str], Any]:
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
