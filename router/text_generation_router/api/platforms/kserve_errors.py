"""Errors of the Open Inference Protocol as it writes them; TGI's form of it has TGI's errors."""

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from text_generation_router.api import errors as tgi_errors
from text_generation_router.api.v1_errors import ERRORS as OPENAI_ERRORS
from text_generation_router.api.v1_errors import RequestError, describe
from text_generation_router.errors import RouterError

PATH = "/v2/"
# In the scope of a request that TGI would refuse.
_OPEN = "text_generation_router.open_inference"


class InferenceErrorBody(BaseModel):
    """Body of every error."""

    error: str = Field(description="What went wrong.")


class InferenceError(RequestError):
    """Tensors that contradict each other, or are not what the model takes."""


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**known, "model": InferenceErrorBody} for status, known in OPENAI_ERRORS.items()
}


def mark_as_open(scope: Scope) -> None:
    """Errors of this request have the form of the protocol, not of TGI."""
    scope[_OPEN] = True


def respond(request: Request, error: Exception) -> Response:
    """The answer to a request that failed; `error` is anything a route or the framework raised."""
    path = request.url.path
    is_tgis = "/versions/" in path or path.startswith("/v2/health/")
    if is_tgis and _OPEN not in request.scope:
        return tgi_errors.respond(request, error)
    headers = error.headers if isinstance(error, HTTPException | RouterError) else None
    status, detail = describe(error, path, request.method)
    return JSONResponse({"error": detail["message"]}, status, headers=headers)
