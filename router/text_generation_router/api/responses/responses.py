"""POST /v1/responses of OpenAI: the route and its stream."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.fields import warning
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.models import check_model
from text_generation_router.api.responses.events import ResponseRun
from text_generation_router.api.responses.input import left_out
from text_generation_router.api.responses.output import Json
from text_generation_router.api.responses.schemas import ResponseBody, ResponsesRequest
from text_generation_router.api.routes import ServicesDependency, open_stream, unless_disconnected
from text_generation_router.api.sse import named_events
from text_generation_router.api.v1_errors import ERRORS, describe
from text_generation_router.errors import ContextLengthError

PATH = "/v1/responses"
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response, or with `stream` its events (response.created, …, "
        "response.completed).",
        "content": {"text/event-stream": {}},
    }
}

router = APIRouter(route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["OpenAI"])


@router.post(
    PATH,
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
    headers = {"x-compute-type": services.compute_type} | warning(body, left_out(body))
    if body.stream:
        writer = _Writer(run)
        return await open_stream(
            request, writer.chunks(), headers, writer.failed, has_status=_has_status
        )
    whole = await unless_disconnected(request, _whole(run))
    if whole is None:
        return Response(status_code=499)
    return Response(orjson.dumps(whole), media_type="application/json", headers=headers)


def _has_status(error: Exception) -> bool:
    """OpenAI streams that the context is exceeded: only in the event do clients look for it."""
    return not isinstance(error, ContextLengthError)


async def _whole(run: ResponseRun) -> Json:
    """The response as the last event has it. Raises RouterError."""
    last: list[Json] = []
    async for batch in run.events():
        last = batch
    response = last[-1]["response"]
    assert isinstance(response, dict)
    return response


class _Writer:
    """Writes the events of one response; owns their numbers."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run
        self._number = 0

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Events for one write each. Raises RouterError."""
        async with aclosing(self._run.events()) as batches:
            async for batch in batches:
                yield self._chunk(batch)

    def failed(self, error: Exception) -> bytes:
        """The last events of a stream that failed."""
        _, detail = describe(error, PATH)
        code = detail["code"] if isinstance(error, ContextLengthError) else "server_error"
        begun = [] if self._number else self._run.created()
        return self._chunk([*begun, self._run.failed(code, detail["message"])])

    def _chunk(self, batch: Sequence[Json]) -> bytes:
        start = self._number
        self._number += len(batch)
        return named_events(
            {"type": event["type"], "sequence_number": number, **event}
            for number, event in enumerate(batch, start)
        )
