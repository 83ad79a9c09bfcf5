"""Every error of TGI's own routes as TGI writes it."""

from collections.abc import Mapping

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from text_generation_router.api.body import BodyError, shape_error
from text_generation_router.errors import RouterError


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
