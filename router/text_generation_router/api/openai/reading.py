"""Prompts that are read and not continued: POST /v1/embeddings, a vector for each text; and POST
/score and /rerank, with and without /v1 (and /v2/rerank), how well documents answer, in the forms
of vLLM, Jina and Cohere. Described of these is only what is this server's own."""

import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import orjson
from fastapi import Response
from pydantic import AliasChoices, BaseModel, Field, field_validator, model_validator

from text_generation_router.api.answers import (
    float32_json,
    in_pieces,
    json_response,
    timing_headers,
)
from text_generation_router.api.errors import OPENAI_ERRORS, STATUSES, TGI_ERRORS, RequestError
from text_generation_router.api.models import check_model
from text_generation_router.api.openai.answers import envelope
from text_generation_router.api.openai.sampling import Prompts, TruncateTokens, prompts_of
from text_generation_router.api.routes import ServicesDependency, post_router
from text_generation_router.errors import GenerationError
from text_generation_router.fields import Body, CacheSalt, Items, Refused, optional
from text_generation_router.infer import MOST_PROMPTS
from text_generation_router.reading import NotARerankerError, score, vector_of
from text_generation_router.request import PromptResult
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

# Numbers up to which the answer is written at once, with its length.
_MOST_AT_ONCE = 8192

embeddings_router = post_router("OpenAI", OPENAI_ERRORS)
router = post_router("Scoring", {})
_SCORE: Any = {"summary": "Score pairs"}
_RERANK: Any = {"summary": "Rank documents"}


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


@embeddings_router.post(
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
    # The prompts are texts or ids.
    asked = [
        GenerateParameters(
            inputs=given if isinstance(given, str) else "",
            input_ids=None if isinstance(given, str) else given,
            add_special_tokens=body.add_special_tokens is not False,
            max_new_tokens=1,
            truncate=body.truncate_prompt_tokens,
            pooling=services.pooling,
            cache_salt=body.cache_salt,
        )
        for given in prompts_of(body.input)
    ]
    results = await services.infer.read_prompts(asked, services.options)
    found = [result.prefill.pooled for result in results]
    if not all(found):
        raise GenerationError("the shards have given no hidden state")
    usage, headers = _costs(results, sum(len(one.inputs) for one in asked), services)
    num_bytes = sum(map(len, found))
    pieces = _pieces(found, body, services.config.model_names[0], usage)
    is_short = num_bytes <= 4 * _MOST_AT_ONCE
    return in_pieces(pieces, services, is_short=is_short, num_bytes=num_bytes, headers=headers)


def _costs(
    results: Sequence[PromptResult], characters: int, services: Services
) -> tuple[dict[str, int], dict[str, str]]:
    """The usage and the headers of an answer to prompts of so many characters."""
    num_tokens = sum(result.prompt_tokens for result in results)
    endings = [result.ending for result in results]
    return (
        {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        timing_headers(endings, num_tokens, characters, services),
    )


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


class DocumentBody(Body):
    """A document as an object."""

    text: str


Document = str | DocumentBody


def text_of(document: Document) -> str:
    """The document's text."""
    return document if isinstance(document, str) else document.text


def _check_number(given: Any) -> Any:
    if isinstance(given, list) and not 0 < len(given) <= MOST_PROMPTS:
        raise ValueError(f"must be 1 to {MOST_PROMPTS} texts, {len(given)} are given")
    return given


class ScoringBody(Body):
    """What both bodies have in common. Without `use_activation` scores are raw: the logit of yes
    less that of no."""

    model: str | None = optional("The served model, or `tgi`.")
    instruction: str | None = optional(
        "What makes a document a good one. Default: that it answers a web search query."
    )
    truncate_prompt_tokens: TruncateTokens | None = optional(
        "Cut the end of a document off where its prompt has more tokens; -1: than can be."
    )
    cache_salt: CacheSalt | None = None
    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "activation", "softmax")
    )


class ScoreRequest(ScoringBody):
    """Body of /score: pairs of texts; one text is paired with each of several."""

    text_1: str | Items[str] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="The query, or one for each document. Also called `queries` and `data_1`.",
    )
    text_2: Document | Items[Document] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The documents. Also called `documents`, `items` and `data_2`.",
    )

    _number = field_validator("text_1", "text_2")(_check_number)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Query and document of each score."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        given = self.text_2 if isinstance(self.text_2, list) else [self.text_2]
        if len(queries) == 1:
            queries = queries * len(given)
        return list(zip(queries, map(text_of, given), strict=True))

    @model_validator(mode="after")
    def _are_pairs(self) -> Self:
        first = len(self.text_1) if isinstance(self.text_1, list) else 1
        second = len(self.text_2) if isinstance(self.text_2, list) else 1
        if first not in (1, second):
            raise ValueError(
                "`text_1` must be one text, or as many as `text_2` has. Given: "
                f"{first} and {second}"
            )
        return self


class RerankRequest(ScoringBody):
    """Body of /rerank."""

    query: str
    documents: Items[Document]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    rank_fields: Refused = None
    max_chunks_per_doc: Refused = None
    max_tokens_per_doc: Refused = None

    _number = field_validator("documents")(_check_number)


@router.post("/v1/score", name="score_v1", responses=STATUSES, **_SCORE)
@router.post("/score", name="score", responses=TGI_ERRORS, **_SCORE)
async def score_pairs(body: ScoreRequest, services: ServicesDependency) -> Response:
    """How well each document answers its query, from 0 to 1."""
    scores, usage, headers = await _scored(body, body.pairs, services)
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    head = envelope("score", "list", services)
    return json_response(head | {"data": data, "usage": usage}, headers)


@router.post("/v1/rerank", name="rerank_v1", responses=STATUSES, **_RERANK)
@router.post("/v2/rerank", name="rerank_v2", responses=TGI_ERRORS, **_RERANK)
@router.post("/rerank", name="rerank", responses=TGI_ERRORS, **_RERANK)
async def rerank(body: RerankRequest, services: ServicesDependency) -> Response:
    """The documents, those that answer the query best first."""
    texts = [text_of(document) for document in body.documents]
    pairs = [(body.query, text) for text in texts]
    scores, usage, headers = await _scored(body, pairs, services)
    order = sorted(range(len(pairs)), key=lambda place: -scores[place])
    results = [
        {"index": place}
        | ({} if body.return_documents is False else {"document": {"text": texts[place]}})
        | {"relevance_score": scores[place]}
        for place in order[: body.top_n or len(order)]
    ]
    head = envelope("rerank", "list", services)
    answer = {"id": head["id"], "model": head["model"], "usage": usage, "results": results}
    return json_response(answer, headers)


async def _scored(
    body: ScoringBody, pairs: Sequence[tuple[str, str]], services: Services
) -> tuple[list[float], dict[str, int], dict[str, str]]:
    """A score for each pair of query and document; the usage and the headers of the answer."""
    check_model(body.model, services)
    reranker = services.reranker
    if isinstance(reranker, str):
        raise NotARerankerError(reranker)
    services.metrics.request_count.inc()
    longest, most = services.limits.max_input_tokens, body.truncate_prompt_tokens

    async def asked(query: str, document: str) -> GenerateParameters:
        text, ids = "", None
        if most is None:
            text = reranker.prompt(query, document, body.instruction)
        else:
            room = longest if most == -1 else min(most, longest)
            ids = await reranker.cut_prompt(
                services.tokenizer, query, document, body.instruction, most_tokens=room
            )
        return GenerateParameters(
            inputs=text,
            input_ids=ids,
            add_special_tokens=False,
            max_new_tokens=1,
            score_token_ids=reranker.answer_ids,
            cache_salt=body.cache_salt,
        )

    prompts = [partial(asked, query, document) for query, document in pairs]
    results = await services.infer.read_prompts(prompts, services.options)
    if not all(result.prefill.scores for result in results):
        raise GenerationError("the shards have given no scores")
    characters = sum(len(query) + len(document) for query, document in pairs)
    scores = [score(result.prefill.scores, body.use_activation is False) for result in results]
    return scores, *_costs(results, characters, services)
