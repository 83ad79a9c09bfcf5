"""POST /v1/responses of OpenAI: one response from its creation to its end, whole or as events; the
items of its growing output, and the text inside the input of a custom tool."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from text_generation_router.api.answers import ChatRun, Json, make_id, named_events
from text_generation_router.api.body import tier_of, warning
from text_generation_router.api.errors import STATUSES, describe
from text_generation_router.api.logprobs import TokenTrail, chat_logprobs, scored_events
from text_generation_router.api.models import check_model
from text_generation_router.api.responses.schemas import ResponsesRequest, write_encrypted
from text_generation_router.api.responses.tools import served_tools
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.chat.parser import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.service import ChatGeneration, ChatStep
from text_generation_router.errors import ContextLengthError
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services

PATH = "/v1/responses"
router = post_router("OpenAI", STATUSES)


@router.post(
    PATH,
    summary="Create a response",
    responses=events(
        "The response, or with `stream` its events (response.created, …, response.completed)."
    ),
)
async def responses(body: ResponsesRequest, services: ServicesDependency) -> Response:
    """Text, reasoning and function calls, whole or as events; nothing is stored."""
    services.metrics.request_count.inc()
    check_model(body.model, services)
    run = ResponseRun(body, services)
    headers = {"x-compute-type": services.compute_type} | warning(body, body.left_out())
    # OpenAI streams that the context is exceeded: only in the event do clients look for it.
    return await run.response(
        headers, has_status=lambda error: not isinstance(error, ContextLengthError)
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an item, its text and its events are called."""

    item_type: str
    id_prefix: str
    event: str
    item_fields: Json
    field: str = "text"
    """Of an item with a part that has the text; any other field is of a call, which has it itself.
    """


_MESSAGE = _Kind("message", "msg", "output_text", {"role": "assistant"})
_REASONING = _Kind("reasoning", "rs", "reasoning_text", {"summary": []})
_FUNCTION = _Kind("function_call", "fc", "function_call_arguments", {}, "arguments")
_CUSTOM = _Kind("custom_tool_call", "ctc", "custom_tool_call_input", {}, "input")


class ResponseRun(ChatRun):
    """Answers one request; the last event carries the whole response. Owns the numbers of the
    events, and the items of the output, at most the last of them open."""

    def __init__(self, body: ResponsesRequest, services: Services) -> None:
        super().__init__(body.to_conversation(), bool(body.stream), services)
        self.answer = _envelope(body, services)
        self._body = body
        self._tools = {tool.spec.name: tool for tool in served_tools(body.tools or ())}
        self._trail = TokenTrail()
        self._wants_logprobs = body.wants_logprobs
        self._number = 0
        self._items: list[Json] = []
        self._open: _Kind | None = None
        # Of a custom tool.
        self._input = InputReader()
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []

    async def begin(self, entry: Entry) -> list[Json]:
        """The first events of every stream."""
        return self._created()

    def feed(self, step: ChatStep) -> Iterator[Json]:
        """The events of the next step; log-probabilities are kept for text only."""
        for event, tokens in scored_events(step, self._trail, self._wants_logprobs):
            match event:
                case ContentDelta(text):
                    logprobs: list[Json] = []
                    if tokens:
                        num_top, tokenizer = self._body.top_logprobs or 0, self.services.tokenizer
                        logprobs = chat_logprobs(tokens, num_top, tokenizer)["content"]
                    yield from self._continue_text(_MESSAGE, text, logprobs)
                case ReasoningDelta(text):
                    yield from self._continue_text(_REASONING, text, [])
                case ToolCallStart(_, name):
                    yield from self._start_call(name)
                case ToolCallArguments(_, text):
                    assert self._open is not None
                    if self._open is _CUSTOM:
                        text = self._input.feed(text)
                    if text:
                        self._pieces.append(text)
                        yield self._event(f"{self._open.event}.delta", delta=text)

    def end(self, generation: ChatGeneration) -> list[Json]:
        """The end of the last item, and of the response; there is a message even where the model
        wrote nothing."""
        entry = generation.entry
        assert entry.ending is not None
        generated = entry.ending.generated
        fields: Json
        status, fields = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        if generated.finish_reason is not FinishReason.LENGTH:
            status, fields = "completed", {"completed_at": int(time.time())}
        last = [] if self._items else list(self._continue_text(_MESSAGE, "", []))
        last += self._close(status)
        fields["output"] = self._items
        fields["usage"] = {
            "input_tokens": entry.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": entry.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": generated.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
            "total_tokens": entry.prompt_tokens + generated.generated_tokens,
        }
        return [*last, self._of_response(status, **fields)]

    def written(self, events: Sequence[Json]) -> bytes:
        """The events, numbered."""
        start = self._number
        self._number += len(events)
        return named_events(
            {"type": event["type"], "sequence_number": number, **event}
            for number, event in enumerate(events, start)
        )

    def failed(self, error: Exception) -> bytes:
        """The last events of a stream that failed."""
        _, detail = describe(error, PATH)
        code = detail["code"] if isinstance(error, ContextLengthError) else "server_error"
        begun = [] if self._number else self._created()
        told = self._of_response("failed", error={"code": code, "message": detail["message"]})
        return self.written([*begun, told])

    def _created(self) -> list[Json]:
        return [self._of_response("created"), self._of_response("in_progress")]

    def _start_call(self, name: str) -> Iterator[Json]:
        """`name` is what the model calls the tool."""
        yield from self._close("completed")
        tool = self._tools.get(name)
        kind = _CUSTOM if tool is not None and tool.is_custom else _FUNCTION
        fields = {"call_id": make_id("call"), "name": name if tool is None else tool.name}
        fields[kind.field] = ""
        if tool is not None and tool.namespace is not None:
            fields["namespace"] = tool.namespace
        yield self._add(kind, fields)
        self._input = InputReader()

    def _continue_text(self, kind: _Kind, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if self._open is not kind:
            yield from self._close("completed")
            yield self._add(kind, {"content": []})
            yield self._event("content_part.added", part=_part(kind, "", []))
        if text:
            self._pieces.append(text)
            self._logprobs += logprobs
            more = {"logprobs": logprobs} if kind is _MESSAGE else {}
            yield self._event(f"{kind.event}.delta", delta=text, **more)

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the open item, if there is one."""
        kind, text = self._open, "".join(self._pieces)
        if kind is not None:
            fields: Json = {kind.field: text}
            more = {"logprobs": self._logprobs} if kind is _MESSAGE else {}
            yield self._event(f"{kind.event}.done", **fields, **more)
            if "content" in self._items[-1]:
                part = _part(kind, text, self._logprobs)
                yield self._event("content_part.done", part=part)
                fields = {"content": [part]}
            if kind is _REASONING and self._body.wants_encrypted_reasoning:
                fields["encrypted_content"] = write_encrypted(text)
            self._items[-1] = {**self._items[-1], **fields, "status": status}
            yield self._of_item("done")
        self._open, self._pieces, self._logprobs = None, [], []

    def _add(self, kind: _Kind, fields: Json) -> Json:
        item = {"id": make_id(kind.id_prefix), "type": kind.item_type, **kind.item_fields, **fields}
        self._items.append({**item, "status": "in_progress"})
        self._open = kind
        return self._of_item("added")

    def _of_response(self, status: str, **fields: Any) -> Json:
        """The event of that name; a response that was just created is in progress as well."""
        self.answer = {
            **self.answer,
            "status": "in_progress" if status == "created" else status,
            **fields,
        }
        return {"type": f"response.{status}", "response": self.answer}

    def _of_item(self, name: str) -> Json:
        place = {"output_index": len(self._items) - 1, "item": self._items[-1]}
        return {"type": f"response.output_item.{name}", **place}

    def _event(self, name: str, **fields: Any) -> Json:
        """An event inside of the last item."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if "content" in item:
            place["content_index"] = 0
        return {"type": f"response.{name}", **place, **fields}


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


def _part(kind: _Kind, text: str, logprobs: list[Json]) -> Json:
    more = {"annotations": [], "logprobs": logprobs} if kind is _MESSAGE else {}
    return {"type": kind.event, "text": text, **more}


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters. The first half of a pair is read with what follows it: the second half, or not.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})))*",
    re.DOTALL,
)


class InputReader:
    """Reads the text of `{"input": "…"}` while it is written. Owns what is not read yet."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_open = False

    def feed(self, written: str) -> str:
        """The characters that are known now and were not before."""
        self._rest += written
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        known = _CHARACTERS.match(self._rest)
        assert known is not None
        self._rest = self._rest[known.end() :]
        text: str = json.loads(f'"{known[0]}"', strict=False)
        # Half a pair is no character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
