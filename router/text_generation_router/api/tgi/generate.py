"""TGI's routes of texts: /, /generate, /generate_stream and /tokenize; their bodies, for parsing
(requests) and for the documentation (answers)."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from fastapi import Response
from pydantic import BaseModel, Field

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
from text_generation_router.api.body import DETERMINISTIC, STREAM, GrammarBody, grammar_of
from text_generation_router.api.errors import TGI_ERRORS, end_as_tgi
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.errors import DeadlineError, RouterError
from text_generation_router.fields import (
    Body,
    CacheSalt,
    Items,
    LogitBias,
    Uint32,
    Uint64,
    optional,
    with_numbers_of_tgi,
)
from text_generation_router.request import GeneratedText, GenerateResult, Token, TokenOutput
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

Json = dict[str, Any]


@with_numbers_of_tgi
class GenerateParametersBody(Body):
    """How to generate. The fields after `adapter_id` are not in TGI."""

    best_of: Uint64 | None = optional(
        "Generate this many texts, and return the one whose tokens are the likeliest.", examples=[1]
    )
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = optional(
        "Draw tokens at random, instead of the likeliest one. True if `parameters` is left out.",
        default=False,
        examples=[True],
    )
    max_new_tokens: Uint32 | None = optional(
        "The most tokens to generate. Default: as many as fit after the prompt.", examples=[20]
    )
    return_full_text: bool | None = optional(
        "Put the prompt before the generated text.", examples=[False]
    )
    stop: Items[str] = optional(
        "Generation stops after any of these.", default=[], examples=[["photographer"]]
    )
    truncate: Uint64 | None = optional("Keep only this many of the prompt's last tokens.")
    watermark: bool = optional(
        "Mark the text, so that a detector can tell that a model wrote it.",
        default=False,
        examples=[True],
    )
    details: bool = optional("Return the generated tokens, too.", default=False)
    decoder_input_details: bool = optional(
        "Return the prompt's tokens, too. Not for a stream.", default=False
    )
    seed: Uint64 | None = optional("The same seed draws the same tokens. Default: random.")
    top_n_tokens: Uint32 | None = optional(
        "Return this many of the likeliest tokens at each step.", examples=[5]
    )
    grammar: GrammarBody | None = optional("The form that the generated text must have.")
    adapter_id: str | None = optional("Not supported.")
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = optional(
        "Token id, and what is added to its logit: -100 to 100."
    )
    ignore_eos_token: bool = optional("Go on after an end-of-sequence token.", default=False)
    min_new_tokens: Uint32 | None = optional(
        "The text does not end before it has this many tokens."
    )
    deterministic: bool = optional(DETERMINISTIC, default=False)
    cache_salt: CacheSalt | None = None


class GenerateRequest(Body):
    """Body of /generate, /generate_stream and /tokenize."""

    inputs: str = Field(description="The prompt.", examples=["My name is Olivier and I"])
    # TGI: without `parameters` tokens are drawn, with `{}` the best ones are taken.
    parameters: GenerateParametersBody = Field(
        default_factory=lambda: GenerateParametersBody(do_sample=True),
        description="How to generate. /tokenize does not read it.",
    )

    def to_parameters(self, return_full_text: bool = False) -> GenerateParameters:
        """The same without pydantic; `return_full_text` is what its absence means."""
        # Those that a protocol adds to them are read by its own route.
        names = GenerateParametersBody.model_fields
        given = {name: getattr(self.parameters, name) for name in names}
        if given["return_full_text"] is None:
            given["return_full_text"] = return_full_text
        given["stop"] = tuple(self.parameters.stop)
        given["grammar"] = grammar_of(self.parameters.grammar)
        return GenerateParameters.of(inputs=self.inputs, **given)


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /."""

    stream: bool = optional(STREAM, default=False)


class PrefillTokenBody(BaseModel):
    """One token of the prompt."""

    id: int = Field(description="The number of the token in the vocabulary.")
    text: str
    logprob: float | None = Field(
        description="The log-probability of the token. The prompt's first token has none."
    )


class TokenBody(PrefillTokenBody):
    """One generated token."""

    special: bool = Field(
        description="Whether it is one of the model's special tokens, which are not part of the "
        "text."
    )


class SequenceBody(BaseModel):
    """The details of a generation."""

    finish_reason: str = Field(
        description="Why the text ended.", examples=["length", "eos_token", "stop_sequence"]
    )
    generated_tokens: int = Field(description="How many tokens were generated.")
    seed: int | None = Field(
        description="The seed that tokens were drawn with. null: none were drawn."
    )
    prefill: list[PrefillTokenBody] = Field(
        description="The prompt's tokens, if `decoder_input_details` was true."
    )
    tokens: list[TokenBody] = Field(description="The generated tokens.")
    top_tokens: list[list[TokenBody]] = optional(
        "For each generated token the likeliest ones. Left out when empty.", default=[]
    )


class BestOfSequenceBody(SequenceBody):
    """One of the generations that were not chosen."""

    generated_text: str = Field(description="Its text.")


class DetailsBody(SequenceBody):
    """Details of the answer, and the generations that were not chosen."""

    best_of_sequences: list[BestOfSequenceBody] = optional(
        "The other generations of `best_of`. Left out when empty.", default=[]
    )


class GenerateResponse(BaseModel):
    """Answer of /generate."""

    generated_text: str = Field(
        description="The text, with the prompt before it if that was asked for."
    )
    details: DetailsBody | None = optional("Left out unless asked for.")


class StreamDetailsBody(BaseModel):
    """Details of a stream."""

    finish_reason: str = Field(description="Why the text ended.")
    generated_tokens: int = Field(description="How many tokens were generated.")
    seed: int | None = Field(
        description="The seed that tokens were drawn with. null: none were drawn."
    )
    input_length: int = Field(description="Tokens of the prompt.")


class StreamResponse(BaseModel):
    """One event of /generate_stream."""

    index: int = Field(description="1 for the first token.")
    token: TokenBody = Field(description="The token that was generated.")
    top_tokens: list[TokenBody] = optional(
        "The likeliest tokens of this step. Left out when empty.", default=[]
    )
    generated_text: str | None = Field(description="The whole text. Only in the last event.")
    details: StreamDetailsBody | None = Field(description="Only in the last event, if asked for.")


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
        details = _sequence(best)
        if others:
            details["best_of_sequences"] = [
                {"generated_text": _full_text(other.ending.generated.text, asked)}
                | _sequence(other)
                | _top_tokens(other)
                for other in others
            ]
        answer["details"] = details | _top_tokens(best)
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
        num_tokens = 0
        async for outputs in generation:
            yield token_events(outputs, num_tokens, asked, generation.prompt_tokens)
            num_tokens += len(outputs)


# Nearly every event; writing the payload with orjson gives the same bytes.
_TOKEN_EVENT = (
    'data: {"index":%d,"token":{"id":%d,"text":%s,"logprob":%s,"special":%s},'
    '"generated_text":null,"details":null}\n\n'
)


def token_events(
    outputs: Sequence[TokenOutput], num_before: int, asked: GenerateParameters, prompt_tokens: int
) -> bytes:
    """The events of outputs that are ready together, behind those of `num_before` tokens."""
    events: list[str] = []
    for index, (token, _, top_tokens, generated) in enumerate(outputs, num_before + 1):
        if not top_tokens and generated is None:
            text, logprob = orjson.dumps(token.text).decode(), float32_json(token.logprob)
            special = "true" if token.special else "false"
            events.append(_TOKEN_EVENT % (index, token.id, text, logprob, special))
            continue
        payload: Json = {"index": index, "token": _token(token)}
        if top_tokens:
            payload["top_tokens"] = [_token(one) for one in top_tokens]
        payload |= {"generated_text": None, "details": None}
        if generated is not None:
            payload["generated_text"] = _full_text(generated.text, asked)
            if asked.details:
                payload["details"] = _ending(generated) | {"input_length": prompt_tokens}
        events.append(event(payload).decode())
    return "".join(events).encode()


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
