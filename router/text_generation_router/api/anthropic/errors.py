"""Every error of Anthropic's routes as Anthropic writes it, so that clients raise theirs."""

from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from text_generation_router.api.anthropic.schemas import BLOCK_TYPE
from text_generation_router.api.body import complaint_of, short
from text_generation_router.api.errors import describe, error_answer, furthest, respond_as_openai
from text_generation_router.api.models import is_anthropics
from text_generation_router.api.sse import named_events
from text_generation_router.errors import ContextLengthError
from text_generation_router.request_id import current

PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def respond(request: Request, error: Exception) -> Response:
    """The answer to a request that failed; `error` is anything a route or the framework raised."""
    path = request.url.path if isinstance(error, HTTPException) else PATH
    status, message = _describe(error, path, request.method)
    return error_answer(_body(status, message), status, error)


def respond_about_models(request: Request, error: Exception) -> Response:
    """The same for the list of models, which OpenAI's clients read as well."""
    return (respond if is_anthropics(request) else respond_as_openai)(request, error)


def failed(error: Exception) -> bytes:
    """The last event of a stream that failed."""
    return named_events([_body(*_describe(error))])


def _describe(error: Exception, path: str = PATH, method: str = "POST") -> tuple[int, str]:
    """The status and the sentence."""
    if isinstance(error, ContextLengthError):
        return 400, _context_complaint(error)
    if isinstance(error, RequestValidationError):
        return 400, _shape_complaint(error)
    status, detail = describe(error, path, method)
    return status, detail["message"]


def _context_complaint(error: ContextLengthError) -> str:
    """Anthropic's sentences. Clients read the numbers: at the first they shorten the conversation,
    at the second they ask for fewer tokens."""
    num, most = error.num_prompt_tokens, error.max_input_tokens
    if num > most:
        return f"prompt is too long: {num} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num} + {error.max_new_tokens} > "
        f"{error.max_total_tokens}, decrease input length or `max_tokens` and try again"
    )


def _shape_complaint(error: RequestValidationError) -> str:
    """Anthropic's form, by which clients find the block that they must leave out: the path, with
    the types of blocks in it, and what is wrong there."""
    path, first = furthest(error.errors(), error.body, has_types=True)
    complaint = complaint_of(first)
    block = first["input"]
    if first["type"] == BLOCK_TYPE and isinstance(block, dict) and "type" in block:
        path.append(str(block["type"]))
        if block["type"] in ("image", "document"):
            complaint = "this model reads text only"
    return ": ".join(filter(None, (".".join(map(short, path)), complaint)))


def _body(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    request = current()
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": None if request is None else request.request_id,
    }
