"""The HTTP application: routes, middleware and the one way in which errors leave."""

import asyncio
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

from text_generation_router.api import (
    chat_tokenize,
    generate,
    info,
    kserve,
    kserve_errors,
    messages,
    messages_errors,
    rerank,
    responses,
    sagemaker,
    tokenize,
    vertex,
)
from text_generation_router.api import errors as tgi_errors
from text_generation_router.api.document import complete_openapi
from text_generation_router.api.keys import DocsBehindKey
from text_generation_router.api.openai import chat, completions, embeddings, models
from text_generation_router.api.openai import errors as openai_errors
from text_generation_router.api.sse import let_streams_finish
from text_generation_router.config import VERSION, RouterConfig
from text_generation_router.errors import RouterError, ShuttingDownError
from text_generation_router.keys import Keys
from text_generation_router.services import Services

ROUTERS = (
    generate.router,
    tokenize.router,
    info.key_router,
    info.router,
    kserve.body_router,
    kserve.key_router,
    kserve.router,
    completions.router,
    chat.router,
    models.router,
    embeddings.router,
    rerank.router,
    responses.router,
    messages.router,
    chat_tokenize.router,
    sagemaker.router,
    vertex.router,
)

# The first prefix of the path that fits decides; all other paths are TGI's.
ERROR_FORMS = (
    (messages_errors.PATH, messages_errors.respond),
    (messages_errors.MODELS_PATH, messages_errors.respond_about_models),
    ("/v1/", openai_errors.respond),
    ("/v2/rerank", tgi_errors.respond),
    (kserve_errors.PATH, kserve_errors.respond),
)


def create_app(
    config: RouterConfig, services: Services | None = None, keys: Keys | None = None
) -> FastAPI:
    """The application; without services it can only describe itself (`openapi`).

    It runs the batcher while it is up. `keys` are those of the configuration, if they were read.
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
    # Vertex may name a path that is taken, and gets it.
    app.state.routers = (*vertex.aip_routers(config), *ROUTERS)
    for router in app.state.routers:
        app.include_router(router)
    app.add_api_route("/docs/", _docs, include_in_schema=False)
    complete_openapi(app, app.state.routers, keys.are_asked_for)
    _add_error_handlers(app, config)
    if keys.are_asked_for and not config.public_docs:
        app.add_middleware(DocsBehindKey, refuse=partial(_respond, config=config))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_allow_origin) or ["*"],
        allow_methods=["GET", "POST"],
        # OpenAI's and Anthropic's clients send many of their own.
        allow_headers=["*"],
    )
    if config.prometheus_port is not None:
        app.add_middleware(MetricsPort, port=config.prometheus_port)
    let_streams_finish()
    return app


def create_refusal(config: RouterConfig) -> ASGIApp:
    """Answers everything with 503, as the API that the path belongs to does, while the server is
    brought to its end."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        response = _respond(Request(scope), ShuttingDownError(), config)
        await response(scope, receive, send)

    return refuse


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


def _add_error_handlers(app: FastAPI, config: RouterConfig) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, StarletteHTTPException) and error.status_code == 405:
            error.headers = {"allow": ",".join(sorted(_allowed_methods(request)))}
        response = _respond(request, error, config)
        _forget_frames(error)
        return response

    for kind in (RouterError, RequestValidationError, StarletteHTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _forget_frames(error: BaseException | None) -> None:
    """Empties the frames that the error left: they hold the request's body, and several of them the
    error, so that all of it would lie there until the garbage collector comes, which is rare."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _respond(request: Request, error: Exception, config: RouterConfig) -> Response:
    """Every error leaves in the form of the API that the path belongs to."""
    path = request.url.path
    forms = (respond for prefix, respond in ERROR_FORMS if path.startswith(prefix))
    respond = next(forms, tgi_errors.respond)
    # Vertex names paths under /v1/ as well.
    return (tgi_errors.respond if path == config.aip_predict_route else respond)(request, error)


def _allowed_methods(request: Request) -> set[str]:
    """The methods of all routes at this path; starlette names those of the first only."""
    methods: set[str] = set()
    for route in chain(
        request.app.routes, *(router.routes for router in request.app.state.routers)
    ):
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return methods
