"""The HTTP application: routes, middleware and the one way in which errors leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.api import generate, info
from text_generation_router.api.body import BodyError, shape_error
from text_generation_router.api.sse import let_streams_finish
from text_generation_router.config import VERSION, RouterConfig
from text_generation_router.errors import RouterError
from text_generation_router.services import Services

ROUTERS = (generate.router, info.body_router, info.router)


def create_app(config: RouterConfig, services: Services | None = None) -> FastAPI:
    """The application; without services it can only describe itself (`openapi`).

    It runs the batcher while it is up.
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
    for router in ROUTERS:
        app.include_router(router)
    app.add_api_route("/docs/", _docs, include_in_schema=False)
    _add_error_handlers(app)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_allow_origin) or ["*"],
        allow_methods=["GET", "POST"],
        allow_headers=["content-type", "authorization"],
    )
    if config.prometheus_port is not None:
        app.add_middleware(MetricsPort, port=config.prometheus_port)
    let_streams_finish()
    return app


class MetricsPort:
    """Answers nothing but /metrics on the port that is for Prometheus."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["server"][1] == self._port
            and scope["path"] != "/metrics"
        ):
            await Response(status_code=404)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The batcher's task lives here. If it crashes it says so in the log, and /health is 503."""
    services = app.state.services
    assert isinstance(services, Services)
    run = asyncio.create_task(services.batcher.run(), name="batcher")
    try:
        yield
    finally:
        await services.batcher.close()
        await asyncio.gather(run, return_exceptions=True)


async def _docs() -> RedirectResponse:
    return RedirectResponse("/docs")


def _add_error_handlers(app: FastAPI) -> None:
    """Every error has a JSON body, but 401, 404 and 405, which are empty as TGI's are."""

    @app.exception_handler(RouterError)
    async def router_error(request: Request, error: RouterError) -> Response:
        return _error(error.status_code, error.message, error.error_type)

    @app.exception_handler(BodyError)
    async def body_error(request: Request, error: BodyError) -> Response:
        return _error(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def wrong_shape(request: Request, error: RequestValidationError) -> Response:
        return _error(422, shape_error(error.errors()))

    @app.exception_handler(StarletteHTTPException)
    async def no_such_route(request: Request, error: StarletteHTTPException) -> Response:
        headers = None
        if error.status_code == 405:
            headers = {"allow": ",".join(sorted(_allowed_methods(request)))}
        return Response(status_code=error.status_code, headers=headers)

    @app.exception_handler(Exception)
    async def our_bug(request: Request, error: Exception) -> Response:
        # The server writes the traceback to the log.
        return _error(500, "The server failed on this request; its log says why", "internal")


def _error(status_code: int, sentence: str, error_type: str = "validation") -> Response:
    return JSONResponse({"error": sentence, "error_type": error_type}, status_code)


def _allowed_methods(request: Request) -> set[str]:
    """The methods of all routes at this path; starlette names those of the first only."""
    methods: set[str] = set()
    for route in chain(request.app.routes, *(router.routes for router in ROUTERS)):
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return methods
