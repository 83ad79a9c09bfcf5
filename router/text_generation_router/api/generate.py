"""POST /generate, /generate_stream and /, with TGI's fields in TGI's order."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Depends, Request, Response

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.keys import caller_of
from text_generation_router.api.numbers import float32, float32_json
from text_generation_router.api.schemas import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
)
from text_generation_router.api.sse import (
    COMMENT,
    EventStream,
    disconnected,
    error_event,
    event,
)
from text_generation_router.api.timing import timing_headers
from text_generation_router.errors import RouterError
from text_generation_router.infer import GenerateResult
from text_generation_router.request import Output, Token, TokenOutput
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Json = dict[str, Any]

UNAUTHORIZED: dict[int | str, dict[str, Any]] = {
    401: {"description": "The API key is missing or wrong; the body is empty"}
}
ERRORS: dict[int | str, dict[str, Any]] = UNAUTHORIZED | {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "The body is not JSON"),
        (404, "The adapter is not served"),
        (408, "The body did not arrive in time"),
        (413, "The body is too large"),
        (415, "The body does not say that it is JSON"),
        (422, "Input validation error"),
        (424, "Generation error"),
        (429, "Model is overloaded"),
        (500, "Incomplete generation"),
        (503, "The server is busy with other large requests, or is being stopped"),
    )
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines `data: {…}`; what goes wrong after the body was read is one too, "
        "but for 429 and 503.",
        "content": {
            "text/event-stream": {"schema": {"$ref": "#/components/schemas/StreamResponse"}}
        },
    }
}
# Where an answer is a stream, FastAPI would document errors as events too.
_STREAM_ERRORS: dict[int | str, dict[str, Any]] = UNAUTHORIZED | {
    status: {
        "description": answer["description"],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
    }
    for status, answer in ERRORS.items()
    if status not in UNAUTHORIZED
}

router = APIRouter(route_class=JsonRoute, tags=["Text Generation Inference"])


async def services_of(request: Request) -> Services:
    """The services of the app that got this request, for whoever sent it."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services.on_behalf_of(caller_of(request.scope))


ServicesDependency = Annotated[Services, Depends(services_of)]


@router.post(
    "/generate",
    summary="Generate tokens",
    response_model=GenerateResponse,
    responses=ERRORS,
)
async def generate(
    body: GenerateRequest, request: Request, services: ServicesDependency
) -> Response:
    """Generate tokens."""
    services.metrics.request_count.inc()
    return await _generate(body.to_parameters(), request, services, in_list=False)


@router.post(
    "/generate_stream",
    summary="Generate a stream of token using Server-Sent Events",
    status_code=200,
    response_class=EventStream,
    response_model=StreamResponse,
    responses=_EVENTS | _STREAM_ERRORS,
)
async def generate_stream(
    body: GenerateRequest, request: Request, services: ServicesDependency
) -> Response:
    """Generate a stream of tokens using Server-Sent Events."""
    services.metrics.request_count.inc()
    return await _generate_stream(body.to_parameters(), request, services)


@router.post(
    "/",
    summary="Generate tokens if `stream == false` or a stream of token if `stream == true`",
    response_model=list[GenerateResponse],
    responses=_EVENTS | ERRORS,
)
async def compat_generate(
    body: CompatGenerateRequest, request: Request, services: ServicesDependency
) -> Response:
    """Generate tokens, or a stream of tokens if `stream` is true."""
    services.metrics.request_count.inc()
    # What TGI does for a model whose task the Hub does not know otherwise.
    asked = body.to_parameters(return_full_text=True)
    if body.stream:
        return await _generate_stream(asked, request, services)
    return await _generate(asked, request, services, in_list=True)


async def _generate(
    asked: GenerateParameters, request: Request, services: Services, in_list: bool
) -> Response:
    """The whole answer; a client that leaves meanwhile ends the generation."""
    outcome = await unless_disconnected(request, services.infer.generate_best_of(asked))
    if outcome is None:
        return Response(status_code=499)
    best, others = outcome
    answer = generate_answer(best, others, asked)
    return Response(
        orjson.dumps([answer] if in_list else answer),
        media_type="application/json",
        headers=timing_headers([best.ending], best.prompt_tokens, len(asked.inputs), services),
    )


def generate_answer(
    best: GenerateResult, others: list[GenerateResult], asked: GenerateParameters
) -> Json:
    """The body of /generate."""
    answer: Json = {"generated_text": _full_text(best.ending.generated.text, asked)}
    if asked.details or asked.decoder_input_details:
        answer["details"] = _details(best, others, asked)
    return answer


async def _generate_stream(
    asked: GenerateParameters, request: Request, services: Services
) -> Response:
    """The stream, once it is let in; whatever goes wrong from there on is an event."""
    headers = {
        "x-compute-type": services.compute_type,
        "x-compute-characters": str(len(asked.inputs)),
    }
    return await open_stream(request, _stream(asked, services), headers)


async def open_stream(
    request: Request,
    chunks: AsyncGenerator[bytes],
    headers: Mapping[str, str],
    keep_alive: bytes = COMMENT,
) -> Response:
    """The response that sends `chunks`, of which the first, which may be empty, is awaited here:
    what goes wrong before it is raised, and answered with a status."""
    first = await unless_disconnected(request, anext(chunks))
    if first is None:
        return Response(status_code=499)
    return EventStream(chunks, headers, keep_alive, first)


async def _stream(asked: GenerateParameters, services: Services) -> AsyncGenerator[bytes]:
    """Events as they become ready, those ready together in one chunk; before them an empty one.

    As TGI has it, what is wrong with a request is an event. Raises what passes, as too many
    requests do, if it comes first.
    """
    is_let_in = False
    try:
        async with services.infer.start(asked, is_stream=True) as generation:
            is_let_in = True
            yield b""
            writer = TokenEvents(asked, generation.prompt_tokens)
            async for outputs in generation:
                yield writer.chunk(outputs)
    except RouterError as error:
        if error.retry_after_s is not None and not is_let_in:
            raise
        yield error_event(error)
    except Exception:
        logger.exception("A stream failed; this is a bug in the router")
        yield error_event(RouterError("The server failed on this request; its log says why"))


# What nearly every event looks like; `json` of the payload would be the same bytes.
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

    def chunk(self, outputs: Sequence[Output]) -> bytes:
        """The events of tokens that are ready together. A prompt's log-probabilities have none."""
        told = [self._event(output) for output in outputs if isinstance(output, TokenOutput)]
        return "".join(told).encode()

    def _event(self, output: TokenOutput) -> str:
        self._index += 1
        token, _, top_tokens, generated, _ = output
        if top_tokens or generated is not None:
            return event(self._payload(output)).decode()
        return _TOKEN_EVENT % (
            self._index,
            token.id,
            orjson.dumps(token.text).decode(),
            float32_json(token.logprob),
            "true" if token.special else "false",
        )

    def _payload(self, output: TokenOutput) -> Json:
        payload: Json = {"index": self._index, "token": _token(output.token)}
        if output.top_tokens:
            payload["top_tokens"] = [_token(token) for token in output.top_tokens]
        generated = output.generated
        payload["generated_text"] = None
        payload["details"] = None
        if generated is not None:
            payload["generated_text"] = _full_text(generated.text, self._asked)
            if self._asked.details:
                payload["details"] = {
                    "finish_reason": generated.finish_reason.value,
                    "generated_tokens": generated.generated_tokens,
                    "seed": generated.seed,
                    "input_length": self._prompt_tokens,
                }
        return payload


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
    generated = result.ending.generated
    return {
        "finish_reason": generated.finish_reason.value,
        "generated_tokens": generated.generated_tokens,
        "seed": generated.seed,
        "prefill": [
            {"id": token.id, "text": token.text, "logprob": float32(token.logprob)}
            for token in result.prefill.tokens
        ],
        "tokens": [_token(token) for token in result.tokens],
    }


def _top_tokens(result: GenerateResult) -> Json:
    """The key is absent when there is nothing to tell."""
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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None after cancelling it because the client left."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


async def at_once(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; one failure fails, and ends, all."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
