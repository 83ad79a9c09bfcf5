"""API keys at HTTP: the check of a request's key, its declaration in OpenAPI, and its caller."""

import time
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Request, Response, Security
from fastapi.openapi.models import APIKey, HTTPBearer
from fastapi.openapi.models import SecurityBase as SecurityModel
from fastapi.security.base import SecurityBase
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.keys import Keys
from text_generation_router.request_options import CALLER

_NO_KEY = (
    "The API key is missing or wrong; send one that the server was started with as "
    "`Authorization: Bearer KEY` or `x-api-key: KEY`"
)
# The documentation and what its page loads.
_DOCS = ("/docs", "/api-doc/", "/static-offline-docs")


class KeyScheme(SecurityBase):
    """A header with an API key, as OpenAPI declares it. A route that depends on it is behind the
    keys; the request may send its key in the header of any scheme."""

    def __init__(self, name: str, model: SecurityModel) -> None:
        self.scheme_name = name
        self.model = model

    async def __call__(self, request: Request) -> None:
        """Raises HTTPException 401."""
        check_key(request.scope)


_BEARER = HTTPBearer(description="An API key of this server, as OpenAI's clients send it.")
_HEADER = {
    "in": "header",
    "name": "x-api-key",
    "description": "An API key of this server, as Anthropic's clients send it. "
    "One of the two headers is enough.",
}
NEEDS_KEY: list[Any] = [
    Security(KeyScheme("HTTPBearer", _BEARER)),
    Security(KeyScheme("APIKeyHeader", APIKey.model_validate(_HEADER))),
]
"""The dependencies of a router whose routes are behind the API keys."""


def docs_behind_key(app: ASGIApp, refuse: Callable[[Request, Exception], Response]) -> ASGIApp:
    """The same with the documentation behind the API keys."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        if scope["type"] == "http" and scope["path"].startswith(_DOCS):
            try:
                check_key(scope)
            except HTTPException as error:
                answering = refuse(Request(scope), error)
        await answering(scope, receive, send)

    return answer


def check_key(scope: Scope) -> None:
    """Finds the caller of the request, for its options. Raises HTTPException 401.

    A second check of the same request does nothing.
    """
    if CALLER in scope:
        return
    state = scope["app"].state
    keys = state.keys
    assert isinstance(keys, Keys)
    caller = keys.caller(_sent_key(scope), time.monotonic())
    if caller is None:
        state.services.metrics.request_unauthorized.inc()
        raise HTTPException(401, _NO_KEY, {"www-authenticate": "Bearer"})
    scope[CALLER] = caller


def _sent_key(scope: Scope) -> bytes | None:
    """The key in the header of OpenAI's or of Anthropic's clients; a repeated header has none."""
    authorizations = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(authorizations) == 1:
        scheme, _, key = authorizations[0].partition(b" ")
        if scheme.lower() == b"bearer":
            return bytes(key.strip())
    others = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return others[0].strip() if len(others) == 1 and len(authorizations) < 2 else None
