"""TGI's routes of texts: /, /generate, /generate_stream and /tokenize."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from fastapi import Response

from text_generation_router.api.answers import (
    TokenizedToken,
    event,
    float32,
    float32_json,
    json_response,
    open_stream,
    render_tokens,
    timing_headers,
    token_answer,
)
from text_generation_router.api.errors import TGI_ERRORS, end_as_tgi
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.api.tgi.schemas import (
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
)
from text_generation_router.errors import DeadlineError, RouterError
from text_generation_router.request import GeneratedText, GenerateResult, Token, TokenOutput
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

Json = dict[str, Any]

_EVENTS = events(
    "Lines `data: {…}`; what goes wrong after the body was read is one too, but for 429, 503 and "
    "504 before the first token.",
    StreamResponse,
)

router = post_router("Text Generation Inference", TGI_ERRORS)


@router.post(
    "/generate",
    summary="Generate tokens",
    response_model=GenerateResponse,
)
async def generate(body: GenerateRequest, services: ServicesDependency) -> Response:
    """Generate tokens."""
    services.metrics.request_count.inc()
    return await _generate(body.to_parameters(), services, in_list=False)


@router.post(
    "/generate_stream",
    summary="Generate a stream of token using Server-Sent Events",
    status_code=200,
    response_class=Response,
    response_model=StreamResponse,
    responses=_EVENTS,
)
async def generate_stream(body: GenerateRequest, services: ServicesDependency) -> Response:
    """Generate a stream of tokens using Server-Sent Events."""
    services.metrics.request_count.inc()
    return await _generate_stream(body.to_parameters(), services)


@router.post(
    "/",
    summary="Generate tokens if `stream == false` or a stream of token if `stream == true`",
    response_model=list[GenerateResponse],
    responses=_EVENTS,
)
async def compat_generate(body: CompatGenerateRequest, services: ServicesDependency) -> Response:
    """Generate tokens, or a stream of tokens if `stream` is true."""
    services.metrics.request_count.inc()
    # What TGI does for a model whose task the Hub does not know otherwise.
    asked = body.to_parameters(return_full_text=True)
    if body.stream:
        return await _generate_stream(asked, services)
    return await _generate(asked, services, in_list=True)


@router.post(
    "/tokenize",
    summary="Tokenize inputs",
    response_model=list[TokenizedToken],
)
async def tokenize(body: GenerateRequest, services: ServicesDependency) -> Response:
    """The tokens of the inputs with their byte offsets."""
    with services.infer.admitted(1, services.options):
        encoding = await services.tokenizer.encode(body.inputs, add_special_tokens=True)
    return token_answer(body.inputs, encoding, render_tokens(body.inputs, encoding), services)


async def _generate(asked: GenerateParameters, services: Services, in_list: bool) -> Response:
    """The whole answer."""
    best, others = await services.infer.generate_best_of(asked, services.options)
    answer = generate_answer(best, others, asked)
    headers = timing_headers([best.ending], best.prompt_tokens, len(asked.inputs), services)
    return json_response([answer] if in_list else answer, headers)


def generate_answer(
    best: GenerateResult, others: list[GenerateResult], asked: GenerateParameters
) -> Json:
    """The body of /generate."""
    answer: Json = {"generated_text": _full_text(best.ending.generated.text, asked)}
    if asked.details or asked.decoder_input_details:
        answer["details"] = _details(best, others, asked)
    return answer


async def _generate_stream(asked: GenerateParameters, services: Services) -> Response:
    """The stream. As TGI has it, what is wrong with the request is an event; before admission only
    what passes, as too many requests do, is answered with a status."""
    headers = {
        "x-compute-type": services.compute_type,
        "x-compute-characters": str(len(asked.inputs)),
    }
    chunks = _stream(asked, services)
    return await open_stream(chunks, headers, end_as_tgi, has_status=_passes)


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed at another time."""
    is_limited = isinstance(error, RouterError) and error.retry_after_s is not None
    return is_limited or isinstance(error, DeadlineError)


async def _stream(asked: GenerateParameters, services: Services) -> AsyncGenerator[bytes]:
    """Events as they become ready, those ready together in one chunk. The first chunk is empty: it
    says that the request is admitted."""
    started = services.infer.start_many(asked, 1, services.options, is_stream=True)
    async with started as [generation]:
        yield b""
        writer = TokenEvents(asked, generation.prompt_tokens)
        async for outputs in generation:
            yield writer.chunk(outputs)


# Nearly every event; writing the payload with orjson gives the same bytes.
_TOKEN_EVENT = (
    'data: {"index":%d,"token":{"id":%d,"text":%s,"logprob":%s,"special":%s},'
    '"generated_text":null,"details":null}\n\n'
)


class TokenEvents:
    """Writes the events of one stream; owns their count."""

    def __init__(self, asked: GenerateParameters, prompt_tokens: int) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._index = 0

    def chunk(self, outputs: Sequence[TokenOutput]) -> bytes:
        """The events of outputs that are ready together."""
        return "".join([self._event(output) for output in outputs]).encode()

    def _event(self, output: TokenOutput) -> str:
        self._index += 1
        token, _, top_tokens, generated = output
        if not top_tokens and generated is None:
            return _TOKEN_EVENT % (
                self._index,
                token.id,
                orjson.dumps(token.text).decode(),
                float32_json(token.logprob),
                "true" if token.special else "false",
            )
        payload: Json = {"index": self._index, "token": _token(token)}
        if top_tokens:
            payload["top_tokens"] = [_token(one) for one in top_tokens]
        payload |= {"generated_text": None, "details": None}
        if generated is not None:
            payload["generated_text"] = _full_text(generated.text, self._asked)
            if self._asked.details:
                payload["details"] = _ending(generated) | {"input_length": self._prompt_tokens}
        return event(payload).decode()


def _details(best: GenerateResult, others: list[GenerateResult], asked: GenerateParameters) -> Json:
    details = _sequence(best)
    if others:
        details["best_of_sequences"] = [
            {"generated_text": _full_text(other.ending.generated.text, asked), **_sequence(other)}
            | _top_tokens(other)
            for other in others
        ]
    return details | _top_tokens(best)


def _sequence(result: GenerateResult) -> Json:
    return _ending(result.ending.generated) | {
        "prefill": [
            {"id": token.id, "text": token.text, "logprob": float32(token.logprob)}
            for token in result.prefill.tokens
        ],
        "tokens": [_token(token) for token in result.tokens],
    }


def _ending(generated: GeneratedText) -> Json:
    return {
        "finish_reason": generated.finish_reason.value,
        "generated_tokens": generated.generated_tokens,
        "seed": generated.seed,
    }


def _top_tokens(result: GenerateResult) -> Json:
    """The key is absent when there are none."""
    if not result.top_tokens:
        return {}
    return {"top_tokens": [[_token(token) for token in step] for step in result.top_tokens]}


def _token(token: Token) -> Json:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": float32(token.logprob),
        "special": token.special,
    }


def _full_text(text: str, asked: GenerateParameters) -> str:
    return asked.inputs + text if asked.return_full_text else text
