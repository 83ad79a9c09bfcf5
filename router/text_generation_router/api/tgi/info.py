"""GET /health, /ping, /, /info and /metrics."""

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from text_generation_router.api.dependencies import ServicesDependency, get
from text_generation_router.api.errors import UNAUTHORIZED, ErrorResponse
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.tgi.features import features
from text_generation_router.api.tgi.schemas import InfoResponse
from text_generation_router.config import VERSION
from text_generation_router.errors import UnhealthyError
from text_generation_router.metrics import CONTENT_TYPE
from text_generation_router.services import Services

HEALTH_TIMEOUT_S = 5

UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorResponse, "description": "Service not ready"}
}

# Health and metrics need no key.
router = APIRouter(tags=["Text Generation Inference"])
key_router = APIRouter(dependencies=NEEDS_KEY, tags=["Text Generation Inference"])


async def check_health(services: Services) -> None:
    """Raises UnhealthyError unless every shard takes work and the scheduler runs."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            is_healthy = await services.batcher.probe()
    except TimeoutError:
        is_healthy = False
    if not is_healthy:
        raise UnhealthyError


@get(router, "/", include_in_schema=False)
@get(router, "/ping", include_in_schema=False)
@get(
    router,
    "/health",
    summary="Health check method",
    response_class=Response,
    responses=UNHEALTHY,
)
async def health(services: ServicesDependency) -> Response:
    """200 while every shard takes work and the scheduler runs."""
    await check_health(services)
    return Response()


@get(
    key_router,
    "/info",
    summary="Text Generation Inference endpoint info",
    response_model=InfoResponse,
    responses=UNAUTHORIZED,
)
async def get_model_info(services: ServicesDependency) -> Response:
    """What this server is and what it allows."""
    config, limits, shard = services.config, services.limits, services.info
    scheduler = services.scheduler_limits
    answer = InfoResponse(
        model_id=config.served_model_id,
        model_sha=config.revision,
        model_pipeline_tag=None,
        max_concurrent_requests=config.max_concurrent_requests,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        router="text-generation-router",
        version=VERSION,
        sha=None,
        docker_label=None,
        max_batch_total_tokens=scheduler.max_batch_total_tokens,
        max_batch_prefill_tokens=scheduler.max_batch_prefill_tokens,
        max_batch_size=scheduler.max_batch_size,
        waiting_served_ratio=scheduler.waiting_served_ratio,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        model_dtype=shard.dtype,
        model_device_type=shard.device_type,
        model_vocab_size=shard.vocab_size,
        num_shard=shard.world_size,
        block_size=scheduler.block_size,
        num_blocks=scheduler.num_blocks,
        attention_impl=shard.attention_impl,
        features=features(services),
    )
    return Response(answer.model_dump_json(), media_type="application/json")


@get(router, "/metrics", summary="Prometheus metrics scrape endpoint", response_class=Response)
async def metrics(services: ServicesDependency) -> Response:
    """Every metric in Prometheus' text format."""
    return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE})
