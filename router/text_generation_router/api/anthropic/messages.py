"""POST /v1/messages and /v1/messages/count_tokens of Anthropic, whole or as events: what a request
asks for, as a conversation, and its answer."""

import asyncio
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson
from fastapi import Response

from text_generation_router.api import answers
from text_generation_router.api.answers import ChatRun, Json, json_response, make_id, named_events
from text_generation_router.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from text_generation_router.api.body import warning
from text_generation_router.api.errors import STATUSES, end_as_anthropic
from text_generation_router.api.models import check_model
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.chat.parser import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.service import ChatGeneration, ChatStep
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services

# Clients drop thinking without a signature from the history. In base64, as Anthropic's are.
_SIGNATURE = b64encode(b"not signed: this server does not check thinking").decode()


_STOP_REASONS = {
    FinishReason.EOS_TOKEN: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.STOP_SEQUENCE: "stop_sequence",
}


class MessageRun(ChatRun):
    """Answers one request. Owns the blocks of the message, at most the last of them open."""

    def __init__(self, body: MessagesRequest, services: Services) -> None:
        super().__init__(body.to_conversation(), body.stream, services)
        self._blocks: list[Json] = []
        self._pieces: list[str] = []
        self._is_open = False
        # A ping follows the first events.
        self._after = _PING
        self.answer = {
            "id": make_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": services.config.model_names[0],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def begin(self, entry: Entry) -> list[Json]:
        """message_start has the number of cached tokens, and waits up to `KEEP_ALIVE_S` for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(answers.KEEP_ALIVE_S):
                await entry.ready()
        return [{"type": "message_start", "message": {**self.answer, "usage": _usage(entry, 0)}}]

    def feed(self, step: ChatStep) -> Iterator[Json]:
        """The events of the next step."""
        for event in step.events:
            match event:
                case ContentDelta(text):
                    yield from self._open({"type": "text", "text": ""})
                    yield self._piece(text, {"type": "text_delta", "text": text})
                case ReasoningDelta(text):
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._piece(text, {"type": "thinking_delta", "thinking": text})
                case ToolCallStart(_, name):
                    use = {"type": "tool_use", "id": make_id("toolu"), "name": name, "input": {}}
                    yield from self._open(use)
                case ToolCallArguments(_, text):
                    yield self._piece(text, {"type": "input_json_delta", "partial_json": text})

    def end(self, generation: ChatGeneration) -> list[Json]:
        """Why the message ended: `tool_use` if the model ended it after a call. Its usage is
        final."""
        entry = generation.entry
        assert entry.ending is not None
        generated = entry.ending.generated
        reason = _STOP_REASONS[generated.finish_reason]
        if generation.has_tool_calls and reason == "end_turn":
            reason = "tool_use"
        delta = {"stop_reason": reason, "stop_sequence": generated.stop_sequence}
        usage = _usage(entry, generated.generated_tokens)
        last = list(self._close())
        self.answer |= {"content": self._blocks, **delta, "usage": usage}
        return [
            *last,
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def written(self, events: Sequence[Json]) -> bytes:
        """The events for one write."""
        after, self._after = self._after, b""
        return named_events(events) + after

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        return end_as_anthropic(error)

    def _open(self, block: Json) -> Iterator[Json]:
        """Opens the block, unless it is more of the text that is open."""
        kind = block["type"]
        if self._is_open and kind == self._blocks[-1]["type"] and kind != "tool_use":
            return
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _close(self) -> Iterator[Json]:
        """Ends the open block, if there is one."""
        if not self._is_open:
            return
        block, text = dict(self._blocks[-1]), "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._blocks[-1] = block
        self._pieces.clear()
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _piece(self, text: str, delta: Json) -> Json:
        self._pieces.append(text)
        return self._delta(delta)

    def _delta(self, delta: Json) -> Json:
        index = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}


def _object(arguments: str) -> Any:
    """The arguments as an object; {} for a call that was cut off, whose `stop_reason` says so."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(entry: Entry, output_tokens: int) -> Json:
    """`input_tokens` are the tokens that were not cached: clients add up all three kinds."""
    return {
        "input_tokens": entry.prompt_tokens - entry.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": entry.cached_tokens,
        "output_tokens": output_tokens,
    }


_PING = named_events([{"type": "ping"}])

router = post_router("Anthropic", STATUSES)


@router.post(
    "/v1/messages",
    summary="Create a message",
    responses=events("The message, or with `stream` its events (message_start, …, message_stop)."),
)
async def messages(body: MessagesRequest, services: ServicesDependency) -> Response:
    """Text, thinking and tool use, whole or as events."""
    services.metrics.request_count.inc()
    check_model(body.model, services)
    headers = {"x-compute-type": services.compute_type} | warning(body)
    return await MessageRun(body, services).response(headers, keep_alive=_PING)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a message",
)
async def count_tokens(body: CountTokensRequest, services: ServicesDependency) -> Response:
    """The length of the prompt, counted as /v1/messages counts it."""
    check_model(body.model, services)
    with services.infer.admitted(1, services.options):
        prompt = await services.chat.render(body.to_conversation())
        tokens = await services.tokenizer.token_ids(prompt, add_special_tokens=False)
    return json_response({"input_tokens": len(tokens)})
