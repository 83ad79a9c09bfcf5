"""The HTTP application: routes, middleware and the one error handler."""

import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import RedirectResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.api import models
from text_generation_router.api.answers import let_streams_finish
from text_generation_router.api.anthropic import messages
from text_generation_router.api.errors import respond
from text_generation_router.api.openai import chat, completions, reading
from text_generation_router.api.platforms import clouds, kserve
from text_generation_router.api.responses import responses
from text_generation_router.api.routes import complete_openapi
from text_generation_router.api.tgi import generate, info
from text_generation_router.config import VERSION, RouterConfig
from text_generation_router.edge.front import PROBES
from text_generation_router.edge.keys import Keys, docs_behind_key
from text_generation_router.errors import (
    RouterError,
    ShuttingDownError,
    StartingError,
    UnhealthyError,
)
from text_generation_router.request_options import TRACE
from text_generation_router.services import Services
from text_generation_router.state import ServerState, State

ROUTERS = (
    generate.router,
    info.key_router,
    info.router,
    kserve.tgi_router,
    kserve.open_router,
    info.kserve_key_router,
    info.kserve_router,
    completions.router,
    chat.router,
    models.router,
    reading.embeddings_router,
    reading.router,
    responses.router,
    messages.router,
    chat.tokenize_router,
    clouds.sagemaker_router,
    clouds.router,
)


def create_app(
    config: RouterConfig, services: Services | None = None, keys: Keys | None = None
) -> FastAPI:
    """The application; without services only its OpenAPI works.

    Its lifespan runs the batcher. `keys` default to those of the configuration.
    """
    app = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/api-doc/openapi.json",
        title="Text Generation Inference",
        description="Text Generation Webserver",
        license_info={
            "name": "Apache 2.0",
            "url": "https://www.apache.org/licenses/LICENSE-2.0",
        },
        version=VERSION,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=_lifespan,
    )
    app.state.config = config
    app.state.services = services
    app.state.keys = keys = keys or Keys.of(config)
    # First, so that Vertex's routes win over others with the same path.
    app.state.routers = (*clouds.aip_routers(config), *ROUTERS)
    for router in app.state.routers:
        app.include_router(router)
    app.add_api_route("/docs/", _to_docs, include_in_schema=False)
    complete_openapi(app, app.state.routers, keys.are_asked_for)
    _add_error_handlers(app, config)
    if keys.are_asked_for and not config.public_docs:
        app.add_middleware(docs_behind_key, refuse=partial(respond, config=config))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_allow_origin) or ["*"],
        allow_methods=["GET", "POST"],
        # OpenAI's and Anthropic's clients send many headers of their own.
        allow_headers=["*"],
    )
    if config.prometheus_port is not None:
        app.add_middleware(metrics_only, port=config.prometheus_port)
    let_streams_finish()
    return app


async def _to_docs() -> RedirectResponse:
    return RedirectResponse("/docs")


def create_closed(config: RouterConfig, state: ServerState) -> ASGIApp:
    """Answers during the start and the shutdown: probes with the phase, health checks as usual, and
    all other requests with 503, in the error form of the path's API."""
    health_paths = {"/", "/ping", "/health", config.aip_health_route}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request, path = Request(scope), scope["path"]
        if path in PROBES and request.method in ("GET", "HEAD"):
            response = info.probe_answer(state, path == "/livez")
        elif state.state is not State.STARTING:
            response = respond(request, ShuttingDownError(), config)
        else:
            error = UnhealthyError() if path in health_paths else StartingError(state.phase)
            response = respond(request, error, config)
        await response(scope, receive, send)

    return answer


def metrics_only(app: ASGIApp, port: int) -> ASGIApp:
    """The same, of which this port has /metrics only."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_here = scope["type"] == "http" and scope["server"][1] == port
        is_hidden = is_here and scope["path"] != "/metrics"
        await (Response(status_code=404) if is_hidden else app)(scope, receive, send)

    return answer


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Runs the batcher's task. If the batcher fails, it logs an error and /health is 503."""
    services = app.state.services
    assert isinstance(services, Services)
    async with services.batcher.running():
        services.state.go(State.READY)
        yield


def _add_error_handlers(app: FastAPI, config: RouterConfig) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, StarletteHTTPException) and error.status_code == 405:
            error.headers = {"allow": ",".join(sorted(_allowed_methods(request)))}
        response = respond(request, error, config)
        if (trace := request.scope.get(TRACE)) is not None and isinstance(error, RouterError):
            trace.fail(error.error_type)
        _forget_frames(error)
        return response

    for kind in (RouterError, RequestValidationError, StarletteHTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _forget_frames(error: BaseException | None) -> None:
    """Clears the error's frames. They hold the request's body, and some of them the error: this
    cycle would stay in memory until the next garbage collection, which is rare."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _allowed_methods(request: Request) -> set[str]:
    """The methods of all routes at this path; starlette only names those of the first."""
    methods: set[str] = set()
    for route in chain(
        request.app.routes, *(router.routes for router in request.app.state.routers)
    ):
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return methods
