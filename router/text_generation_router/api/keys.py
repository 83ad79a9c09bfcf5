"""Who sends a request: its API key looked at before anything else, 401 without a good one."""

import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.callers import ANYBODY, Caller
from text_generation_router.keys import Keys

_NO_KEY = (
    "The API key is missing or wrong; send one that the server was started with as "
    "`Authorization: Bearer KEY` or `x-api-key: KEY`"
)
# Where in a scope the Caller is, once its key was looked at.
_CALLER = "text_generation_router.caller"
# The documentation and what its page loads.
_DOCS = ("/docs", "/api-doc/", "/static-offline-docs")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class KeyRoute(APIRoute):
    """A route behind the API keys; raises HTTPException 401."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            check_key(request.scope)
            return await handler(request)

        return guarded


class DocsBehindKey:
    """Has the documentation ask for an API key as well."""

    def __init__(self, app: ASGIApp, refuse: Callable[[Request, Exception], Response]) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"].startswith(_DOCS):
            try:
                check_key(scope)
            except HTTPException as error:
                answer = self._refuse(Request(scope), error)
        await answer(scope, receive, send)


def check_key(scope: Scope) -> None:
    """Notes who sends the request, for `caller_of`. Raises HTTPException 401."""
    state = scope["app"].state
    keys = state.keys
    assert isinstance(keys, Keys)
    caller = keys.caller(_sent_key(scope), time.monotonic())
    if caller is None:
        state.services.metrics.request_unauthorized.inc()
        raise HTTPException(401, _NO_KEY, {"www-authenticate": "Bearer"})
    scope[_CALLER] = caller


def caller_of(scope: Scope) -> Caller:
    """Who sends the request; anybody on routes that are open to all."""
    caller = scope.get(_CALLER, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def _sent_key(scope: Scope) -> bytes | None:
    """The key as OpenAI's clients or as Anthropic's send it; a header that comes twice is none."""
    authorizations = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(authorizations) == 1:
        scheme, _, key = authorizations[0].partition(b" ")
        if scheme.lower() == b"bearer":
            return bytes(key.strip())
    others = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return others[0].strip() if len(others) == 1 and len(authorizations) < 2 else None
