"""POST /v1/chat/completions, the next message of a conversation, and /chat_tokenize, its prompt."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from text_generation_router.api.answers import timing_headers
from text_generation_router.api.body import JsonRoute
from text_generation_router.api.errors import ERRORS as TGI_ERRORS
from text_generation_router.api.fields import tier_of, warning
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.models import check_model
from text_generation_router.api.openai import stream
from text_generation_router.api.openai.answers import ChatCompletion, ChatCompletionChunk, stream_of
from text_generation_router.api.openai.chat_choice import ChoiceStream, choice
from text_generation_router.api.openai.schemas import ChatRequest
from text_generation_router.api.openai.stream import PromptEntries, prompt_logprobs
from text_generation_router.api.routes import ServicesDependency, open_stream, unless_disconnected
from text_generation_router.api.sse import event
from text_generation_router.api.tokens import TokenizedToken, encoded, render_tokens, token_answer
from text_generation_router.api.v1_errors import ERRORS
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.service import ChatGeneration, ChatStep
from text_generation_router.encoding import Encoding
from text_generation_router.services import Services

# Characters of a prompt that /chat_tokenize writes in one go, in less than a millisecond.
_SLICE = 16 * 1024

router = APIRouter(route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["OpenAI"])
tokenize_router = APIRouter(
    route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["Text Generation Inference"]
)


@router.post(
    "/v1/chat/completions",
    summary="Generate tokens",
    response_model=ChatCompletion | ChatCompletionChunk,
    responses=stream_of(ChatCompletionChunk) | ERRORS,
)
async def chat_completions(
    body: ChatRequest, request: Request, services: ServicesDependency
) -> Response:
    """Generate the next message of a conversation."""
    check_model(body.model, services)
    stream.check_num_sequences(body.num_sequences, "n", services)
    services.metrics.request_count.inc()
    conversation = body.to_conversation()
    if body.is_stream:
        headers = {
            "x-compute-type": services.compute_type,
            "x-compute-characters": str(_characters(conversation)),
            **warning(body),
        }
        chunks = _stream(body, conversation, services)
        return await open_stream(request, chunks, headers, stream.failed_event(request.url.path))
    answer = await unless_disconnected(request, _answer(body, conversation, services))
    return Response(status_code=499) if answer is None else answer


async def _answer(body: ChatRequest, conversation: Conversation, services: Services) -> Response:
    """The whole answer. Raises RouterError."""
    entries = PromptEntries(conversation.parameters, 1, "prompt_logprobs")
    async with services.chat.start(conversation) as generations:
        entries.add(generations[0].prompt_tokens)
        for generation in generations:
            generation.hide()
        steps: list[list[ChatStep]] = [[] for _ in generations]
        async with aclosing(stream.merged(generations)) as parts:
            async for index, new in parts:
                steps[index] += new
    if entries.are_many:
        return await asyncio.to_thread(_whole, body, conversation, generations, steps, services)
    return _whole(body, conversation, generations, steps, services)


def _whole(
    body: ChatRequest,
    conversation: Conversation,
    generations: Sequence[ChatGeneration],
    steps: Sequence[Sequence[ChatStep]],
    services: Services,
) -> Response:
    """The answer of generations that have ended."""
    endings = [generation.ending for generation in generations if generation.ending is not None]
    prompt_tokens = generations[0].prompt_tokens
    cached_tokens = generations[0].cached_tokens
    answer = _head("chat.completion", body, services) | {
        "choices": [
            choice(index, steps[index], endings[index], body, services.tokenizer)
            for index in range(len(generations))
        ],
        "usage": stream.usage(
            prompt_tokens,
            cached_tokens,
            stream.generated_tokens(generations),
            _reasoning_tokens(generations),
        ),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = generations[0].prompt_ids
    if body.prompt_logprobs is not None and (prompt := generations[0].prefill) is not None:
        answer["prompt_logprobs"] = prompt_logprobs(prompt, body.prompt_logprobs)
    return Response(
        orjson.dumps(answer),
        media_type="application/json",
        headers=warning(body)
        | timing_headers(endings, prompt_tokens, _characters(conversation), services),
    )


async def _stream(
    body: ChatRequest, conversation: Conversation, services: Services
) -> AsyncGenerator[bytes, None]:
    """The chunks, those ready together in one piece; all choices run at the same time."""
    head = _head("chat.completion.chunk", body, services)
    if body.includes_usage and not body.tells_usage:
        head["usage"] = None
    chunk_writer = stream.ChunkWriter(head)
    async with services.chat.start(conversation) as generations:
        writers = [
            ChoiceStream(index, body, generation, services.tokenizer)
            for index, generation in enumerate(generations)
        ]
        async with aclosing(stream.merged(generations)) as parts:
            async for index, steps in parts:
                if chunks := writers[index].chunks(steps):
                    yield chunk_writer.chunks(chunks)
        last = b""
        if body.includes_usage:
            first = generations[0]
            totals = stream.usage(
                first.prompt_tokens,
                first.cached_tokens,
                stream.generated_tokens(generations),
                _reasoning_tokens(generations),
            )
            last = event(head | {"choices": [], "usage": totals})
    yield last + stream.DONE


def _head(kind: str, body: ChatRequest, services: Services) -> stream.Json:
    """The first fields of an answer and of every chunk; the tier only if requested."""
    head = stream.envelope("chatcmpl", kind, services, body.request_id)
    return (
        head if body.service_tier is None else head | {"service_tier": tier_of(body.service_tier)}
    )


def _reasoning_tokens(generations: Sequence[ChatGeneration]) -> int:
    return sum(generation.reasoning_tokens for generation in generations)


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
    responses=TGI_ERRORS,
)
async def get_chat_tokenize(
    body: ChatRequest, request: Request, services: ServicesDependency
) -> Response:
    """The text that /v1/chat/completions would send to the model. Nothing is added to it."""
    services.metrics.request_count.inc()
    with services.infer.admitted(1):
        text = await services.chat.render(body.to_conversation())
        special = bool(body.add_special_tokens)
        encoding = await encoded(text, request, services, add_special_tokens=special)
    if encoding is None:
        return Response(status_code=499)
    return token_answer(text, encoding, _pieces(text, encoding), services)


def _pieces(text: str, encoding: Encoding) -> Iterator[bytes]:
    yield b'{"tokenize_response":'
    yield from render_tokens(text, encoding)
    yield b',"templated_text":"'
    for start in range(0, len(text), _SLICE):
        yield orjson.dumps(text[start : start + _SLICE])[1:-1]
    yield b'"}'
