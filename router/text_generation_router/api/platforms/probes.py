"""GET /livez, /readyz and /startupz for orchestrators. They read the state and call no shard.

Each answers with `state` (starting, ready, degraded, draining or failed), `phase` (in words),
`since`, and while a model is loaded `progress`."""

from typing import Any

import orjson
from fastapi import APIRouter, Response

from text_generation_router.api.routes import ServicesDependency, get
from text_generation_router.state import ServerState, State

# As /health, without a key.
router = APIRouter(tags=["Text Generation Inference"])


_ANSWERS: dict[str, Any] = {"responses": {503: {"description": "Not so; the body is the same"}}}


def answer(state: ServerState, is_so: bool) -> Response:
    """200 or 503, and how the server is."""
    return Response(
        orjson.dumps(state.as_json()),
        200 if is_so else 503,
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )


@get(router, "/livez", summary="Whether work that waits goes on", **_ANSWERS)
async def livez(services: ServicesDependency) -> Response:
    """503 if work waits and no step has ended within the deadline, or the scheduler has failed."""
    state = services.state
    stalled_s = min(services.batcher.stalled_s, state.age_s)
    is_stuck = state.state is State.READY and stalled_s > services.stall_s
    return answer(state, state.state is not State.FAILED and not is_stuck)


@get(router, "/readyz", summary="Whether requests are taken and computed", **_ANSWERS)
async def readyz(services: ServicesDependency) -> Response:
    """503 while the server starts, its shards are down, it drains or has failed."""
    return answer(services.state, services.state.state is State.READY)


@get(router, "/startupz", summary="Whether the server has started", **_ANSWERS)
async def startupz(services: ServicesDependency) -> Response:
    """503 until it was ready for the first time."""
    return answer(services.state, services.state.has_started)
