"""POST /v1/chat/completions, the next message of a conversation, and /chat_tokenize, its prompt."""

import secrets
import string
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial

import orjson
from fastapi import Response
from pydantic import BaseModel, Field

from text_generation_router.api.answers import (
    TokenizedToken,
    json_response,
    render_tokens,
    timing_headers,
    token_answer,
)
from text_generation_router.api.errors import OPENAI_ERRORS, TGI_ERRORS, end_as_openai
from text_generation_router.api.fields import tier_of, warning
from text_generation_router.api.logprobs import (
    ScoredToken,
    chat_logprobs,
    prompt_logprobs,
    scored_events,
)
from text_generation_router.api.models import check_model
from text_generation_router.api.openai import stream
from text_generation_router.api.openai.answers import STREAM, ChatCompletion, ChatCompletionChunk
from text_generation_router.api.openai.schemas import ChatRequest
from text_generation_router.api.openai.stream import Json, PromptEntries
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.api.sse import open_stream
from text_generation_router.chat.conversation import Conversation, tool_call
from text_generation_router.chat.parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.service import ChatGeneration, ChatMessage, ChatStep
from text_generation_router.infer import gather_or_cancel
from text_generation_router.services import Services
from text_generation_router.text.encoding import Encoding
from text_generation_router.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
# Templates of Mistral's models refuse ids of another length or with other characters.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def new_call_id() -> str:
    """An id for a tool call that every chat template takes."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


class ChoiceWriter(stream.ChoiceWriter):
    """The choice of a generation that has ended; or its chunks: the role, then an event each, then
    the reason to finish."""

    body: ChatRequest
    _has_role = False

    def __init__(
        self, index: int, body: ChatRequest, generation: ChatGeneration, tokenizer: Tokenizer
    ) -> None:
        super().__init__(index, body, generation.entry, tokenizer)
        self._generation = generation

    def whole(self, message: ChatMessage) -> Json:
        """The choice, with its message."""
        body = self.body
        answer: Json = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning is not None and body.include_reasoning is not False:
            answer |= _reasoning(message.reasoning)
        if message.tool_calls:
            answer["tool_calls"] = [
                tool_call(new_call_id(), call.name, call.arguments) for call in message.tool_calls
            ]
        logprobs: Json | None = None
        if body.logprobs:
            told = (scored_events(step, self.trail, body.logprobs) for step in message.steps)
            logprobs = self._logprobs([one for step in told for _, some in step for one in some])
        made = {"index": self.index, "message": answer, "logprobs": logprobs, **self._end()}
        if body.return_token_ids:
            made["token_ids"] = [output.token.id for output in message.outputs]
        return made

    def chunks(self, steps: Sequence[ChatStep]) -> list[Json]:
        """What is new with the steps; nothing if all of it is reasoning that was not asked for."""
        chunks: list[Json] = []
        body = self.body
        if not self._has_role:
            self._has_role = True
            # With tools there may never be any content.
            content = None if body.tools else ""
            first: Json = {"choices": [self._choice({"role": "assistant", "content": content})]}
            if body.return_token_ids:
                first["prompt_token_ids"] = self.made.prompt_ids
            chunks.append(self.told(first))
        for step in steps:
            self.count(step.outputs)
            for event, scored in scored_events(step, self.trail, body.logprobs):
                if body.include_reasoning is not False or not isinstance(event, ReasoningDelta):
                    chunks.append(self.chunk(self._choice(_delta(event), scored)))
        if self._generation.entry.ending is not None:
            chunks.append(self.chunk(self._choice({}) | self._end()))
        return chunks

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json:
        return chat_logprobs(scored, self.body.top_logprobs or 0, self.tokenizer, self.as_ids)

    def _choice(self, delta: Json, scored: Sequence[ScoredToken] = ()) -> Json:
        has_logprobs = self.body.logprobs and "content" in delta
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": self._logprobs(scored) if has_logprobs else None,
            "finish_reason": None,
        }

    def _end(self) -> Json:
        """Why the choice, which has ended, did."""
        assert self.made.ending is not None
        generated = self.made.ending.generated
        otherwise = "tool_calls" if self._generation.has_tool_calls else "stop"
        end: Json = {"finish_reason": stream.finish_reason(generated, otherwise)}
        if self.body.tells_stop_reason:
            end["stop_reason"] = generated.stop_reason
        return end


def _delta(event: ChatEvent) -> Json:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart(index, name):
            call = {"index": index, **tool_call(new_call_id(), name, "")}
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def _reasoning(text: str) -> Json:
    """In both spellings that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


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
        return await open_stream(chunks, headers, partial(end_as_openai, PATH))
    return await _answer(body, conversation, services)


async def _answer(body: ChatRequest, conversation: Conversation, services: Services) -> Response:
    """The whole answer. Raises RouterError."""
    entries = PromptEntries(conversation.parameters, 1, "prompt_logprobs")
    async with services.chat.start(conversation, services.options) as generations:
        entries.add(generations[0].entry.prompt_tokens)
        messages = await gather_or_cancel(generation.collect() for generation in generations)
    return await entries.answered(
        lambda: _whole(body, conversation, generations, messages, services)
    )


def _whole(
    body: ChatRequest,
    conversation: Conversation,
    generations: Sequence[ChatGeneration],
    messages: Sequence[ChatMessage],
    services: Services,
) -> Response:
    """The answer of generations that have ended."""
    endings = [one.entry.ending for one in generations if one.entry.ending is not None]
    prompt_tokens = generations[0].entry.prompt_tokens
    answer = _head("chat.completion", body, services) | {
        "choices": [
            ChoiceWriter(index, body, generation, services.tokenizer).whole(messages[index])
            for index, generation in enumerate(generations)
        ],
        "usage": _totals(generations),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = generations[0].entry.prompt_ids
    if body.prompt_logprobs is not None and (prompt := generations[0].entry.prefill) is not None:
        answer["prompt_logprobs"] = prompt_logprobs(prompt, body.prompt_logprobs)
    times = timing_headers(endings, prompt_tokens, _characters(conversation), services)
    return json_response(answer, warning(body) | times)


async def _stream(
    body: ChatRequest, conversation: Conversation, services: Services
) -> AsyncGenerator[bytes, None]:
    """The chunks, those ready together in one piece; all choices run at the same time."""
    head = _head("chat.completion.chunk", body, services)
    chunk_writer = stream.ChunkWriter(head, body)
    async with services.chat.start(conversation, services.options) as generations:
        writers = [
            ChoiceWriter(index, body, generation, services.tokenizer)
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
    with services.infer.admitted(1, services.options):
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
