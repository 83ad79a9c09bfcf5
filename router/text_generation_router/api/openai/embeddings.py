"""POST /v1/embeddings: a vector for each text."""

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import Response
from pydantic import BaseModel, Field, field_validator

from text_generation_router.api.answers import PieceResponse, float32_json, timing_headers
from text_generation_router.api.errors import OPENAI_ERRORS, RequestError
from text_generation_router.api.models import check_model
from text_generation_router.api.openai.sampling import TruncateTokens
from text_generation_router.api.openai.schemas import Prompts, prompts_of
from text_generation_router.api.routes import ServicesDependency, post_router
from text_generation_router.errors import GenerationError
from text_generation_router.fields import Body, CacheSalt, optional
from text_generation_router.infer import MOST_PROMPTS
from text_generation_router.pooling import vector_of
from text_generation_router.request import PromptResult
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

# Numbers up to which the answer is written at once, with its length.
_MOST_AT_ONCE = 8192

router = post_router("OpenAI", OPENAI_ERRORS)


class EmbeddingRequest(Body):
    """Body of /v1/embeddings. OpenAI does not have the fields from `truncate_prompt_tokens` on,
    which are vLLM's."""

    model: str | None = optional("The served model, or `tgi`.")
    input: Prompts = Field(
        description=f"A text, up to {MOST_PROMPTS}, the ids of one, or the ids of several.",
    )
    encoding_format: Literal["float", "base64"] | None = optional(
        "base64: the bytes of the numbers in float32, little-endian. Default: float."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = optional(
        "Length of the vectors: their first numbers, normalized again; for models that were "
        "trained for it (Matryoshka). Default: all.",
    )
    user: str | None = optional("Not used.")
    truncate_prompt_tokens: TruncateTokens | None = optional(
        "Keep only this many of a text's last tokens; -1: all that fit."
    )
    add_special_tokens: bool | None = optional(
        "Those that the tokenizer adds to a text. Default: true."
    )
    normalize: bool | None = optional("Return vectors of length 1. Default: true.")
    cache_salt: CacheSalt | None = None

    @field_validator("input")
    @classmethod
    def _as_many_as_can_be(cls, given: Any) -> Any:
        if given == []:
            raise ValueError("must not be empty")
        if isinstance(given, list) and not isinstance(given[0], int) and len(given) > MOST_PROMPTS:
            raise ValueError(f"at most {MOST_PROMPTS} texts in one request, {len(given)} are given")
        return given


class EmbeddingBody(BaseModel):
    """The vector of one text; a string with `encoding_format: base64`."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str = Field(description="The vector: a list of numbers, or base64.")


class EmbeddingUsageBody(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int = Field(description="Tokens of all the texts.")
    total_tokens: int = Field(description="The same.")


class EmbeddingListBody(BaseModel):
    """The vectors in the order of the texts."""

    object: str = "list"
    data: list[EmbeddingBody] = Field(description="One vector for each text.")
    model: str
    usage: EmbeddingUsageBody = Field(description="How many tokens it took.")


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    response_model=EmbeddingListBody,
)
async def embeddings(body: EmbeddingRequest, services: ServicesDependency) -> Response:
    """A vector for each text: the hidden state behind the model's last norm, of the last token or
    the mean over all (--pooling)."""
    check_model(body.model, services)
    size = services.info.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise RequestError(
            f"`dimensions` must be <= {size}, the size of this model's vectors. Given: "
            f"{body.dimensions}",
            "dimensions",
        )
    services.metrics.request_count.inc()
    asked = [_asked(given, body, services) for given in prompts_of(body.input)]
    results = await services.infer.read_prompts(asked, services.options)
    return _answer(asked, results, body, services)


def _asked(
    given: str | list[int], body: EmbeddingRequest, services: Services
) -> GenerateParameters:
    text, ids = (given, None) if isinstance(given, str) else ("", given)
    return GenerateParameters(
        inputs=text,
        input_ids=ids,
        add_special_tokens=body.add_special_tokens is not False,
        max_new_tokens=1,
        truncate=body.truncate_prompt_tokens,
        pooling=services.pooling,
        cache_salt=body.cache_salt,
    )


def _answer(
    asked: Sequence[GenerateParameters],
    results: Sequence[PromptResult],
    body: EmbeddingRequest,
    services: Services,
) -> Response:
    """The answer, in pieces unless it is short. Raises OverloadedError where too many clients have
    not read theirs."""
    found = [result.prefill.pooled for result in results]
    num_bytes = sum(map(len, found))
    if not all(found):
        raise GenerationError("the shards have given no hidden state")
    prompt_tokens = sum(result.prompt_tokens for result in results)
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    pieces = _pieces(found, body, services.config.model_names[0], usage)
    characters = sum(len(one.inputs) for one in asked)
    endings = [result.ending for result in results]
    headers = timing_headers(endings, prompt_tokens, characters, services)
    if num_bytes <= 4 * _MOST_AT_ONCE:
        return Response(b"".join(pieces), media_type="application/json", headers=headers)
    response = PieceResponse(pieces, services.long_answers.taken(num_bytes))
    response.headers.update(headers)
    return response


def _pieces(
    found: Sequence[bytes], body: EmbeddingRequest, model: str, usage: dict[str, int]
) -> Iterator[bytes]:
    """The JSON of all vectors, one after another."""
    before = b'{"object":"list","data":['
    for index, pooled in enumerate(found):
        vector = vector_of(pooled, body.dimensions, body.normalize is not False)
        if body.encoding_format == "base64":
            numbers = b'"%b"' % base64.b64encode(vector)
        else:
            numbers = f"[{','.join(map(float32_json, vector))}]".encode()
        one = b'{"object":"embedding","index":%d,"embedding":%b}' % (index, numbers)
        yield before + one
        before = b","
    yield b"]," + orjson.dumps({"model": model, "usage": usage})[1:]
