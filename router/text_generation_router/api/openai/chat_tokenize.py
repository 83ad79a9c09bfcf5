"""POST /chat_tokenize: the prompt that a chat becomes, and its tokens."""

from collections.abc import Iterator

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.dependencies import ServicesDependency
from text_generation_router.api.errors import ERRORS
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.openai.chat_request import ChatRequest
from text_generation_router.api.tokens import TokenizedToken, encoded, render_tokens, token_answer
from text_generation_router.encoding import Encoding

# Characters of the text that are written in one go.
_SLICE = 16 * 1024

router = APIRouter(
    route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["Text Generation Inference"]
)


class ChatTokenizeResponse(BaseModel):
    """The rendered template, and its tokens with their byte offsets into it."""

    tokenize_response: list[TokenizedToken] = Field(description="The tokens of the prompt.")
    templated_text: str = Field(description="The prompt, as the chat template makes it.")


@router.post(
    "/chat_tokenize",
    summary="Template and tokenize ChatRequest",
    response_model=ChatTokenizeResponse,
    responses=ERRORS,
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
