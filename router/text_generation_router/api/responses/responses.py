"""POST /v1/responses of OpenAI: one response from its creation to its end, whole or as events."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response

from text_generation_router.api.answers import json_response, make_id
from text_generation_router.api.errors import STATUSES, describe
from text_generation_router.api.fields import tier_of, warning
from text_generation_router.api.logprobs import TokenTrail, chat_logprobs, scored_events
from text_generation_router.api.models import check_model
from text_generation_router.api.responses.input import conversation_of, left_out
from text_generation_router.api.responses.output import Json, OutputWriter
from text_generation_router.api.responses.schemas import ResponsesRequest
from text_generation_router.api.responses.tools import served_tools
from text_generation_router.api.routes import (
    ServicesDependency,
    events,
    open_stream,
    post_router,
)
from text_generation_router.api.sse import named_events
from text_generation_router.chat.service import ChatGeneration, ChatStep
from text_generation_router.errors import ContextLengthError
from text_generation_router.request import FinishReason
from text_generation_router.services import Services


class ResponseRun:
    """Answers one request; the last event carries the whole response, streamed or not. Owns the
    numbers of the events."""

    def __init__(self, body: ResponsesRequest, services: Services) -> None:
        self._body = body
        self._services = services
        self._conversation = conversation_of(body)
        self._trail = TokenTrail()
        self._wants_logprobs = body.wants_logprobs
        self._response = _envelope(body, services)
        self._number = 0

    async def whole(self) -> Json:
        """The response as the last event has it. Raises RouterError."""
        async for _ in self._events():
            continue
        return self._response

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Events for one write each. Raises RouterError."""
        async with aclosing(self._events()) as batches:
            async for batch in batches:
                yield self._chunk(batch)

    def failed(self, error: Exception) -> bytes:
        """The last events of a stream that failed."""
        _, detail = describe(error, PATH)
        code = detail["code"] if isinstance(error, ContextLengthError) else "server_error"
        begun = [] if self._number else self._created()
        told = self._event("failed", error={"code": code, "message": detail["message"]})
        return self._chunk([*begun, told])

    def _chunk(self, batch: Sequence[Json]) -> bytes:
        start = self._number
        self._number += len(batch)
        return named_events(
            {"type": event["type"], "sequence_number": number, **event}
            for number, event in enumerate(batch, start)
        )

    async def _events(self) -> AsyncGenerator[list[Json]]:
        """The events, those together that are ready together. Raises RouterError."""
        body = self._body
        writer = OutputWriter(served_tools(body.tools or ()), body.wants_encrypted_reasoning)
        services = self._services
        started = services.chat.start(self._conversation, services.options)
        async with started as (generation,):
            if not body.stream:
                generation.entry.is_shown = False
            yield self._created()
            async for steps in generation:
                batch = [event for step in steps for event in self._step_events(step, writer)]
                if batch:
                    yield batch
        yield self._end(writer, generation)

    def _created(self) -> list[Json]:
        """The first events of every stream."""
        return [self._event("created"), self._event("in_progress")]

    def _step_events(self, step: ChatStep, writer: OutputWriter) -> list[Json]:
        made: list[Json] = []
        for event, tokens in scored_events(step, self._trail, self._wants_logprobs):
            logprobs: Sequence[Json] = ()
            if tokens:
                num_top, tokenizer = self._body.top_logprobs or 0, self._services.tokenizer
                logprobs = chat_logprobs(tokens, num_top, tokenizer)["content"]
            made += writer.feed(event, logprobs)
        return made

    def _end(self, writer: OutputWriter, generation: ChatGeneration) -> list[Json]:
        entry = generation.entry
        assert entry.ending is not None
        generated = entry.ending.generated
        is_complete = generated.finish_reason is not FinishReason.LENGTH
        last = list(writer.finish(is_complete))
        fields: Json = {
            "output": writer.items,
            "usage": {
                "input_tokens": entry.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": entry.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": generated.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
                "total_tokens": entry.prompt_tokens + generated.generated_tokens,
            },
        }
        if is_complete:
            return [*last, self._event("completed", completed_at=int(time.time()), **fields)]
        fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*last, self._event("incomplete", **fields)]

    def _event(self, status: str, **fields: Any) -> Json:
        """The event of that name; a response that was just created is in progress as well."""
        self._response = {
            **self._response,
            "status": "in_progress" if status == "created" else status,
            **fields,
        }
        return {"type": f"response.{status}", "response": self._response}


def _envelope(body: ResponsesRequest, services: Services) -> Json:
    """The response before the first token: the fields of the request, with defaults."""
    choice = body.tool_choice or "auto"
    text_format = body.text.format if body.text is not None else None
    return {
        "id": make_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": services.config.model_names[0],
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": tier_of(body.service_tier),
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": {"type": "text"}
            if text_format is None
            else text_format.model_dump(by_alias=True)
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


PATH = "/v1/responses"
_EVENTS = events(
    "The response, or with `stream` its events (response.created, …, response.completed)."
)

router = post_router("OpenAI", STATUSES)


@router.post(
    PATH,
    summary="Create a response",
    responses=_EVENTS,
)
async def responses(body: ResponsesRequest, services: ServicesDependency) -> Response:
    """Text, reasoning and function calls, whole or as events; nothing is stored."""
    services.metrics.request_count.inc()
    check_model(body.model, services)
    run = ResponseRun(body, services)
    headers = {"x-compute-type": services.compute_type} | warning(body, left_out(body))
    if body.stream:
        # OpenAI streams that the context is exceeded: only in the event do clients look for it.
        return await open_stream(
            run.chunks(),
            headers,
            run.failed,
            has_status=lambda error: not isinstance(error, ContextLengthError),
        )
    return json_response(await run.whole(), headers)
