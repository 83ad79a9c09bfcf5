"""TGI's form of errors: that of every route which no other dialect claims."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from text_generation_router.api.body import BodyError, shape_error
from text_generation_router.errors import RouterError


class ErrorResponse(BaseModel):
    """Body of every error."""

    error: str = Field(description="What was wrong, in a sentence.")
    error_type: str = Field(description="The kind of the error, in a word.")


UNAUTHORIZED: dict[int | str, dict[str, Any]] = {
    401: {"description": "The API key is missing or wrong; the body is empty"}
}
ERRORS: dict[int | str, dict[str, Any]] = UNAUTHORIZED | {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "The body is not JSON"),
        (404, "The adapter is not served"),
        (408, "The body did not arrive in time"),
        (413, "The body is too large"),
        (415, "The body does not say that it is JSON"),
        (422, "Input validation error"),
        (424, "Generation error"),
        (429, "Model is overloaded"),
        (500, "Incomplete generation"),
        (503, "The server is busy, has had no turn for the request in time, or is being stopped"),
        (504, "The answer has not ended in time"),
    )
}


def respond(request: Request, error: Exception) -> Response:
    """A JSON body for every error but 401, 404 and 405 of the framework, which are empty."""
    if isinstance(error, RouterError):
        return _error(error.status_code, error.message, error.error_type, error.headers)
    if isinstance(error, RequestValidationError):
        return _error(422, shape_error(error.errors()))
    if isinstance(error, BodyError):
        return _error(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, HTTPException):
        return Response(status_code=error.status_code, headers=error.headers)
    # The server writes the traceback to the log.
    return _error(500, "The server failed on this request; its log says why", "internal")


def _error(
    status_code: int,
    sentence: str,
    error_type: str = "validation",
    headers: Mapping[str, str] | None = None,
) -> Response:
    return JSONResponse({"error": sentence, "error_type": error_type}, status_code, headers)
