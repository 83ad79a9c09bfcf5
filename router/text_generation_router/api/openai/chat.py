"""POST /v1/chat/completions, the next message of a conversation, and /chat_tokenize, its prompt."""

import secrets
import string
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial

import orjson
from fastapi import Response
from pydantic import BaseModel, Field

from text_generation_router.api.answers import json_response, timing_headers
from text_generation_router.api.errors import OPENAI_ERRORS, TGI_ERRORS
from text_generation_router.api.fields import tier_of, warning
from text_generation_router.api.logprobs import (
    ScoredToken,
    TokenTrail,
    chat_logprobs,
    prompt_logprobs,
    tokens_of,
)
from text_generation_router.api.models import check_model
from text_generation_router.api.openai import stream
from text_generation_router.api.openai.answers import STREAM, ChatCompletion, ChatCompletionChunk
from text_generation_router.api.openai.schemas import ChatRequest
from text_generation_router.api.openai.stream import (
    Json,
    PromptEntries,
    usage,
)
from text_generation_router.api.routes import (
    ServicesDependency,
    events,
    open_stream,
    post_router,
)
from text_generation_router.api.tokens import TokenizedToken, render_tokens, token_answer
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.service import ChatGeneration, ChatStep, message_of
from text_generation_router.encoding import Encoding
from text_generation_router.request import Ending, FinishReason
from text_generation_router.services import Services
from text_generation_router.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
# Templates of Mistral's models refuse ids of another length or with other characters.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def new_call_id() -> str:
    """An id for a tool call that every chat template takes."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def choice(
    index: int, steps: Sequence[ChatStep], ending: Ending, body: ChatRequest, tokenizer: Tokenizer
) -> Json:
    """The choice of a generation that has ended."""
    message = message_of(list(steps))
    answer: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning is not None and body.include_reasoning is not False:
        answer |= _reasoning(message.reasoning)
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    logprobs: Json | None = None
    if body.logprobs:
        trail = TokenTrail(body.shows_special_tokens)
        scored = [one for step in steps for _, tokens in _scored(step, trail) for one in tokens]
        logprobs = _logprobs(scored, body, tokenizer)
    made: Json = {
        "index": index,
        "message": answer,
        "logprobs": logprobs,
        "finish_reason": _finish_reason(ending, bool(message.tool_calls)),
    }
    if body.tells_stop_reason:
        made["stop_reason"] = ending.generated.stop_reason
    if body.return_token_ids:
        made["token_ids"] = [output.token.id for output in message.outputs]
    return made


def _logprobs(scored: Sequence[ScoredToken], body: ChatRequest, tokenizer: Tokenizer) -> Json:
    as_ids = bool(body.return_tokens_as_token_ids)
    return chat_logprobs(scored, body.top_logprobs or 0, tokenizer, as_ids)


class ChoiceStream:
    """The chunks of one choice: the role, then an event each, then the reason to finish."""

    def __init__(
        self, index: int, body: ChatRequest, generation: ChatGeneration, tokenizer: Tokenizer
    ) -> None:
        self._index = index
        self._body = body
        self._generation = generation
        self._tokenizer = tokenizer
        self._trail = TokenTrail(body.shows_special_tokens)
        self._has_role = False
        self._num_tokens = 0
        # Ids of the tokens since the last chunk.
        self._new_ids: list[int] = []

    def chunks(self, steps: Sequence[ChatStep]) -> list[Json]:
        """What is new with the steps; nothing if all of it is reasoning that was not asked for."""
        chunks: list[Json] = []
        body = self._body
        if not self._has_role:
            self._has_role = True
            # With tools there may never be any content.
            content = None if body.tools else ""
            chunks.append(self._first({"role": "assistant", "content": content}))
        for step in steps:
            self._num_tokens += len(step.outputs)
            if body.return_token_ids:
                self._new_ids += [output.token.id for output in step.outputs]
            for event, scored in self._events(step):
                if body.include_reasoning is not False or not isinstance(event, ReasoningDelta):
                    chunks.append(self._chunk(self._choice(_delta(event), scored)))
        if (ending := self._generation.entry.ending) is not None:
            reason = _finish_reason(ending, self._generation.has_tool_calls)
            last = self._choice({}, finish_reason=reason)
            if body.tells_stop_reason:
                last["stop_reason"] = ending.generated.stop_reason
            chunks.append(self._chunk(last))
        return chunks

    def _events(self, step: ChatStep) -> Iterable[tuple[ChatEvent, Sequence[ScoredToken]]]:
        if self._body.logprobs:
            return _scored(step, self._trail)
        return ((event, ()) for event in step.events)

    def _first(self, delta: Json) -> Json:
        """The chunk in front of all tokens."""
        more: Json = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._generation.entry.prompt_ids
        return {"choices": [self._choice(delta)], **more, **self._usage()}

    def _chunk(self, choice: Json) -> Json:
        """A chunk with the ids of all tokens since the previous chunk."""
        if self._body.return_token_ids:
            choice["token_ids"], self._new_ids = self._new_ids, []
        return {"choices": [choice], **self._usage()}

    def _usage(self) -> Json:
        """That of this choice so far, if each chunk has it."""
        if not self._body.tells_usage:
            return {}
        made = self._generation.entry
        return {"usage": usage(made.prompt_tokens, made.cached_tokens, self._num_tokens)}

    def _choice(
        self, delta: Json, scored: Sequence[ScoredToken] = (), finish_reason: str | None = None
    ) -> Json:
        logprobs: Json | None = None
        if self._body.logprobs and "content" in delta:
            logprobs = _logprobs(scored, self._body, self._tokenizer)
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def _scored(step: ChatStep, trail: TokenTrail) -> Iterator[tuple[ChatEvent, list[ScoredToken]]]:
    """The events of a step, those with content with the tokens that spell it."""
    for output in step.outputs:
        trail.add(output.token, output.top_tokens)
    for event in step.events:
        yield event, tokens_of(event, trail)


def _delta(event: ChatEvent) -> Json:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": new_call_id(), "type": "function", "function": function}
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def _reasoning(text: str) -> Json:
    """In both spellings that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _finish_reason(ending: Ending, has_tool_calls: bool) -> str:
    if ending.generated.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"


# Characters of a prompt that /chat_tokenize writes in one go, in less than a millisecond.
_SLICE = 16 * 1024

router = post_router("OpenAI", OPENAI_ERRORS)
tokenize_router = post_router("Text Generation Inference", TGI_ERRORS)


@router.post(
    PATH,
    summary="Generate tokens",
    response_model=ChatCompletion | ChatCompletionChunk,
    responses=events(STREAM, ChatCompletionChunk),
)
async def chat_completions(body: ChatRequest, services: ServicesDependency) -> Response:
    """Generate the next message of a conversation."""
    check_model(body.model, services)
    stream.check_num_sequences(body.num_sequences, "n", services)
    services.metrics.request_count.inc()
    conversation = body.to_conversation()
    if body.stream:
        headers = {
            "x-compute-type": services.compute_type,
            "x-compute-characters": str(_characters(conversation)),
            **warning(body),
        }
        chunks = _stream(body, conversation, services)
        return await open_stream(chunks, headers, partial(stream.failed, PATH))
    return await _answer(body, conversation, services)


async def _answer(body: ChatRequest, conversation: Conversation, services: Services) -> Response:
    """The whole answer. Raises RouterError."""
    entries = PromptEntries(conversation.parameters, 1, "prompt_logprobs")
    async with services.chat.start(conversation) as generations:
        entries.add(generations[0].entry.prompt_tokens)
        for generation in generations:
            generation.entry.is_shown = False
        steps: list[list[ChatStep]] = [[] for _ in generations]
        async with aclosing(stream.merged(generations)) as parts:
            async for index, new in parts:
                steps[index] += new
    return await entries.answered(lambda: _whole(body, conversation, generations, steps, services))


def _whole(
    body: ChatRequest,
    conversation: Conversation,
    generations: Sequence[ChatGeneration],
    steps: Sequence[Sequence[ChatStep]],
    services: Services,
) -> Response:
    """The answer of generations that have ended."""
    endings = [one.entry.ending for one in generations if one.entry.ending is not None]
    prompt_tokens = generations[0].entry.prompt_tokens
    answer = _head("chat.completion", body, services) | {
        "choices": [
            choice(index, steps[index], endings[index], body, services.tokenizer)
            for index in range(len(generations))
        ],
        "usage": _totals(generations),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = generations[0].entry.prompt_ids
    if body.prompt_logprobs is not None and (prompt := generations[0].prefill) is not None:
        answer["prompt_logprobs"] = prompt_logprobs(prompt, body.prompt_logprobs)
    times = timing_headers(endings, prompt_tokens, _characters(conversation), services)
    return json_response(answer, warning(body) | times)


async def _stream(
    body: ChatRequest, conversation: Conversation, services: Services
) -> AsyncGenerator[bytes, None]:
    """The chunks, those ready together in one piece; all choices run at the same time."""
    head = _head("chat.completion.chunk", body, services)
    chunk_writer = stream.ChunkWriter(head, body)
    async with services.chat.start(conversation) as generations:
        writers = [
            ChoiceStream(index, body, generation, services.tokenizer)
            for index, generation in enumerate(generations)
        ]
        async with aclosing(stream.merged(generations)) as parts:
            async for index, steps in parts:
                if chunks := writers[index].chunks(steps):
                    yield chunk_writer.chunks(chunks)
    yield chunk_writer.end(lambda: _totals(generations))


def _head(kind: str, body: ChatRequest, services: Services) -> Json:
    """The first fields of an answer and of every chunk; the tier only if requested."""
    head = stream.envelope("chatcmpl", kind, services, body.request_id)
    return (
        head if body.service_tier is None else head | {"service_tier": tier_of(body.service_tier)}
    )


def _totals(generations: Sequence[ChatGeneration]) -> Json:
    """The usage of all generations, which have ended; they have one prompt."""
    return stream.usage(
        generations[0].entry.prompt_tokens,
        generations[0].entry.cached_tokens,
        stream.generated_tokens(generation.entry for generation in generations),
        sum(generation.reasoning_tokens for generation in generations),
    )


def _characters(conversation: Conversation) -> int:
    return sum(len(message["content"]) for message in conversation.messages)


class ChatTokenizeResponse(BaseModel):
    """The rendered template, and its tokens with their byte offsets into it."""

    tokenize_response: list[TokenizedToken] = Field(description="The tokens of the prompt.")
    templated_text: str = Field(description="The prompt, as the chat template makes it.")


@tokenize_router.post(
    "/chat_tokenize",
    summary="Template and tokenize ChatRequest",
    response_model=ChatTokenizeResponse,
)
async def get_chat_tokenize(body: ChatRequest, services: ServicesDependency) -> Response:
    """The text that /v1/chat/completions would send to the model. Nothing is added to it."""
    services.metrics.request_count.inc()
    with services.infer.admitted(1):
        text = await services.chat.render(body.to_conversation())
        special = bool(body.add_special_tokens)
        encoding = await services.tokenizer.encode(text, add_special_tokens=special)
    return token_answer(text, encoding, _pieces(text, encoding), services)


def _pieces(text: str, encoding: Encoding) -> Iterator[bytes]:
    yield b'{"tokenize_response":'
    yield from render_tokens(text, encoding)
    yield b',"templated_text":"'
    for start in range(0, len(text), _SLICE):
        yield orjson.dumps(text[start : start + _SLICE])[1:-1]
    yield b'"}'
