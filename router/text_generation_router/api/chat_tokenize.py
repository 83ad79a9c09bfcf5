"""POST /chat_tokenize: the prompt that a chat becomes, and its tokens."""

import asyncio

import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.generate import ERRORS, ServicesDependency
from text_generation_router.api.info import render_tokens
from text_generation_router.api.openai.chat_request import ChatRequest
from text_generation_router.api.schemas import TokenizedToken

router = APIRouter(route_class=JsonRoute, tags=["Text Generation Inference"])


class ChatTokenizeResponse(BaseModel):
    """The rendered template, and its tokens with their byte offsets into it."""

    tokenize_response: list[TokenizedToken]
    templated_text: str


@router.post(
    "/chat_tokenize",
    summary="Template and tokenize ChatRequest",
    response_model=ChatTokenizeResponse,
    responses=ERRORS,
)
async def get_chat_tokenize(body: ChatRequest, services: ServicesDependency) -> Response:
    """The text that /v1/chat/completions would send to the model. Nothing is added to it."""
    services.metrics.request_count.inc()
    text = await services.chat.render(body.to_conversation())
    encoding = await services.tokenizer.encode(text, add_special_tokens=False)
    # A prompt of megabytes must not stop the streams of others.
    tokens = await asyncio.to_thread(render_tokens, text, encoding)
    content = b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, orjson.dumps(text))
    return Response(content, media_type="application/json")
