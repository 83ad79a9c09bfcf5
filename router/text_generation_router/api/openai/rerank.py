"""POST /score and /rerank, with and without /v1 (and /v2/rerank): how well documents answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from text_generation_router.api.answers import timing_headers
from text_generation_router.api.body import JsonRoute
from text_generation_router.api.errors import ERRORS as TGI_ERRORS
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.models import check_model
from text_generation_router.api.openai.rerank_schemas import (
    RankedTextBody,
    RerankBody,
    RerankRequest,
    ScoreListBody,
    ScoreRequest,
    ScoringBody,
)
from text_generation_router.api.openai.stream import Json, envelope
from text_generation_router.api.routes import ServicesDependency, unless_disconnected
from text_generation_router.api.v1_errors import ERRORS
from text_generation_router.errors import GenerationError
from text_generation_router.prompts import PromptResult, read_prompts
from text_generation_router.reranker import NotARerankerError, Reranker, score
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

router = APIRouter(route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["Scoring"])
_SCORE: Any = {"summary": "Score pairs", "response_model": ScoreListBody}
_RERANK: Any = {"summary": "Rank documents", "response_model": RerankBody | list[RankedTextBody]}


@dataclass(frozen=True, slots=True)
class _Scored:
    """The scores of a request, with the usage and the headers of its answer."""

    scores: list[float]
    usage: dict[str, int]
    headers: dict[str, str]


@router.post("/v1/score", name="score_v1", responses=ERRORS, **_SCORE)
@router.post("/score", name="score", responses=TGI_ERRORS, **_SCORE)
async def score_pairs(
    body: ScoreRequest, request: Request, services: ServicesDependency
) -> Response:
    """How well each document answers its query, from 0 to 1."""
    reranker = _reranker(body, services)
    is_raw = body.use_activation is False
    found = await _scored(reranker, body, body.pairs, is_raw, request, services)
    if found is None:
        return Response(status_code=499)
    data = [
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(found.scores)
    ]
    head = envelope("score", "list", services)
    return _json(head | {"data": data, "usage": found.usage}, found)


@router.post("/v1/rerank", name="rerank_v1", responses=ERRORS, **_RERANK)
@router.post("/v2/rerank", name="rerank_v2", responses=TGI_ERRORS, **_RERANK)
@router.post("/rerank", name="rerank", responses=TGI_ERRORS, **_RERANK)
async def rerank(body: RerankRequest, request: Request, services: ServicesDependency) -> Response:
    """The documents, those that answer the query best first; in TEI's form where they are called
    `texts`."""
    reranker = _reranker(body, services)
    texts = body.given
    pairs = [(body.query, text) for text in texts]
    is_raw = body.use_activation is False or body.raw_scores is True
    found = await _scored(reranker, body, pairs, is_raw, request, services)
    if found is None:
        return Response(status_code=499)
    order = sorted(range(len(pairs)), key=lambda place: -found.scores[place])
    places = order[: body.top_n or len(order)]
    if body.texts is not None:
        return _json([_ranked_text(body, place, texts, found) for place in places], found)
    results = [_ranked(body, place, texts, found) for place in places]
    head = envelope("rerank", "list", services)
    answer = {"id": head["id"], "model": head["model"], "usage": found.usage, "results": results}
    return _json(answer, found)


def _reranker(body: ScoringBody, services: Services) -> Reranker:
    check_model(body.model, services)
    if isinstance(services.reranker, str):
        raise NotARerankerError(services.reranker)
    return services.reranker


async def _scored(
    reranker: Reranker,
    body: ScoringBody,
    pairs: Sequence[tuple[str, str]],
    is_raw: bool,
    request: Request,
    services: Services,
) -> _Scored | None:
    """A score for each pair of query and document; None if the client has left."""
    services.metrics.request_count.inc()
    most = _most_tokens(body, services)
    asked = [partial(_asked, reranker, body, *pair, most, services) for pair in pairs]
    results = await unless_disconnected(request, read_prompts(services.infer, asked))
    if results is None:
        return None
    num_tokens = sum(result.prompt_tokens for result in results)
    characters = sum(len(query) + len(document) for query, document in pairs)
    return _Scored(
        [_score(result, is_raw) for result in results],
        {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        timing_headers([one.ending for one in results], num_tokens, characters, services),
    )


def _most_tokens(body: ScoringBody, services: Services) -> int | None:
    """Of a prompt whose document is cut; None: none is cut."""
    longest, most = services.limits.max_input_tokens, body.truncate_prompt_tokens
    if most is None:
        return longest if isinstance(body, RerankRequest) and body.truncate else None
    return longest if most == -1 else min(most, longest)


async def _asked(
    reranker: Reranker,
    body: ScoringBody,
    query: str,
    document: str,
    most_tokens: int | None,
    services: Services,
) -> GenerateParameters:
    ids, text = None, ""
    if most_tokens is None:
        text = reranker.prompt(query, document, body.instruction)
    else:
        ids = await reranker.cut_prompt(
            services.tokenizer, query, document, body.instruction, most_tokens
        )
    return GenerateParameters(
        inputs=text,
        input_ids=ids,
        add_special_tokens=False,
        max_new_tokens=1,
        score_token_ids=reranker.answer_ids,
        cache_salt=body.cache_salt,
    )


def _score(result: PromptResult, is_raw: bool) -> float:
    if not result.prefill.scores:
        raise GenerationError("the shards have given no scores")
    return score(result.prefill.scores, is_raw)


def _ranked(body: RerankRequest, place: int, texts: Sequence[str], found: _Scored) -> Json:
    document = {} if body.return_documents is False else {"document": {"text": texts[place]}}
    return {"index": place, **document, "relevance_score": found.scores[place]}


def _ranked_text(body: RerankRequest, place: int, texts: Sequence[str], found: _Scored) -> Json:
    text = {"text": texts[place]} if body.return_text else {}
    return {"index": place, "score": found.scores[place], **text}


def _json(content: object, found: _Scored) -> Response:
    return Response(orjson.dumps(content), media_type="application/json", headers=found.headers)
