"""POST /v1/responses of OpenAI: the route and its stream."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.generate import (
    ServicesDependency,
    open_stream,
    unless_disconnected,
)
from text_generation_router.api.openai.errors import BUG, ERRORS
from text_generation_router.api.openai.hints import warning
from text_generation_router.api.openai.models import check_model
from text_generation_router.api.responses_events import ResponseRun
from text_generation_router.api.responses_output import Json
from text_generation_router.api.responses_schemas import ResponseBody, ResponsesRequest
from text_generation_router.api.sse import named_events
from text_generation_router.errors import RouterError

logger = logging.getLogger(__name__)

_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response, or with `stream` its events (response.created, …, "
        "response.completed).",
        "content": {"text/event-stream": {}},
    }
}

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/responses",
    summary="Create a response",
    response_model=ResponseBody,
    responses=_EVENTS | ERRORS,
)
async def responses(
    body: ResponsesRequest, request: Request, services: ServicesDependency
) -> Response:
    """Text, reasoning and function calls, whole or as events; nothing is stored."""
    services.metrics.request_count.inc()
    check_model(body.model, services)
    run = ResponseRun(body, services)
    headers = {"x-compute-type": services.compute_type} | warning(body)
    if body.stream:
        return await open_stream(request, _encoded(run), headers)
    whole = await unless_disconnected(request, _whole(run))
    if whole is None:
        return Response(status_code=499)
    return Response(orjson.dumps(whole), media_type="application/json", headers=headers)


async def _whole(run: ResponseRun) -> Json:
    """The response as the last event has it. Raises RouterError."""
    last: list[Json] = []
    async for batch in run.events():
        last = batch
    response = last[-1]["response"]
    assert isinstance(response, dict)
    return response


async def _encoded(run: ResponseRun) -> AsyncGenerator[bytes]:
    """The events in chunks. Raises what fails before the first; later failures are events."""
    number = 0
    try:
        async with aclosing(run.events()) as batches:
            async for batch in batches:
                yield _chunk(batch, number)
                number += len(batch)
    except RouterError as error:
        if number == 0:
            raise
        yield _chunk([run.failed(error.message)], number)
    except Exception:
        if number == 0:
            raise
        logger.exception("A stream failed; this is a bug in the router")
        yield _chunk([run.failed(BUG)], number)


def _chunk(batch: Sequence[Json], number: int) -> bytes:
    """Events for one write; `number` is that of the first."""
    return named_events(
        {"type": event["type"], "sequence_number": place, **event}
        for place, event in enumerate(batch, start=number)
    )
