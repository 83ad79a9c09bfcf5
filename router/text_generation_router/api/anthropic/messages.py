"""POST /v1/messages and /v1/messages/count_tokens of Anthropic: the routes and the stream."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from text_generation_router.api.anthropic.errors import ERRORS, error_event
from text_generation_router.api.anthropic.events import Json, MessageRun
from text_generation_router.api.anthropic.input import conversation_of
from text_generation_router.api.anthropic.schemas import (
    CountTokensRequest,
    MessageBody,
    MessagesRequest,
    TokenCountBody,
)
from text_generation_router.api.body import JsonRoute
from text_generation_router.api.fields import warning
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.models import check_model
from text_generation_router.api.routes import ServicesDependency, open_stream, unless_disconnected
from text_generation_router.api.sse import named_events
from text_generation_router.services import Services

_PING = named_events([{"type": "ping"}])
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The message, or with `stream` its events (message_start, …, message_stop).",
        "content": {"text/event-stream": {}},
    }
}

router = APIRouter(route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["Anthropic"])


@router.post(
    "/v1/messages",
    summary="Create a message",
    response_model=MessageBody,
    responses=_EVENTS | ERRORS,
)
async def messages(
    body: MessagesRequest, request: Request, services: ServicesDependency
) -> Response:
    """Text, thinking and tool use, whole or as events."""
    services.metrics.request_count.inc()
    check_model(body.model, services)
    run = MessageRun(body, services)
    headers = {"x-compute-type": services.compute_type} | warning(body)
    if body.stream:
        return await open_stream(request, _encoded(run), headers, _failed, keep_alive=_PING)
    whole = await unless_disconnected(request, _whole(run))
    if whole is None:
        return Response(status_code=499)
    return Response(orjson.dumps(whole), media_type="application/json", headers=headers)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a message",
    response_model=TokenCountBody,
    responses=ERRORS,
)
async def count_tokens(
    body: CountTokensRequest, request: Request, services: ServicesDependency
) -> Response:
    """The length of the prompt, counted as /v1/messages counts it."""
    check_model(body.model, services)
    with services.infer.admitted(1):
        num_tokens = await unless_disconnected(request, _count(body, services))
    if num_tokens is None:
        return Response(status_code=499)
    return Response(
        TokenCountBody(input_tokens=num_tokens).model_dump_json(), media_type="application/json"
    )


async def _count(body: CountTokensRequest, services: Services) -> int:
    prompt = await services.chat.render(conversation_of(body))
    tokens = await services.tokenizer.token_ids(prompt, add_special_tokens=False, most=0)
    return tokens.count


async def _whole(run: MessageRun) -> Json:
    """The message. Raises RouterError."""
    async for _ in run.events():
        continue
    return run.message


async def _encoded(run: MessageRun) -> AsyncGenerator[bytes]:
    """The events in chunks; a ping follows the first. Raises RouterError."""
    after = _PING
    async with aclosing(run.events()) as batches:
        async for batch in batches:
            yield named_events(batch) + after
            after = b""


def _failed(error: Exception) -> bytes:
    return named_events([error_event(error)])
