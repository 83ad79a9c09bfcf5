"""The routes about the server: TGI's /info, /health and /metrics; KServe's health and metadata; and
the probes of orchestrators, which read the state and call no shard."""

import asyncio
from dataclasses import fields
from typing import Any

import orjson
from fastapi import APIRouter, HTTPException, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.convertors import StringConvertor, register_url_convertor

from text_generation_router.api.answers import json_response
from text_generation_router.api.errors import (
    STATUSES,
    UNAUTHORIZED,
    ErrorResponse,
    ModelNotFoundError,
)
from text_generation_router.api.models import check_model
from text_generation_router.api.routes import ServicesDependency, get
from text_generation_router.config import VERSION
from text_generation_router.edge.keys import NEEDS_KEY
from text_generation_router.errors import UnhealthyError
from text_generation_router.metrics import CONTENT_TYPE
from text_generation_router.services import Services
from text_generation_router.state import ServerState, State


class InfoResponse(BaseModel):
    """What this server is and allows. Fields that TGI does not have are the last ones."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str = Field(description="The served model.")
    model_sha: str | None = Field(description="The revision of the model.")
    model_pipeline_tag: str | None = Field(description="Always null.")
    max_concurrent_requests: int = Field(
        description="The most requests that wait or run at one time; one more is answered with 429."
    )
    max_best_of: int = Field(description="The largest `best_of`.")
    max_stop_sequences: int = Field(description="The most stop sequences of one request.")
    max_input_tokens: int = Field(description="The longest prompt, in tokens.")
    max_total_tokens: int = Field(
        description="The most tokens of a prompt and its answer together."
    )
    validation_workers: int = Field(description="Threads that tokenize prompts.")
    max_client_batch_size: int = Field(
        description="The value of --max-client-batch-size; no request is limited by it."
    )
    router: str = Field(description="The program that answers.")
    version: str = Field(description="The version of that program.")
    sha: str | None = Field(description="Always null.")
    docker_label: str | None = Field(description="Always null.")
    max_batch_total_tokens: int = Field(
        description="The most tokens that all running requests may hold together."
    )
    max_batch_prefill_tokens: int = Field(description="The most tokens of prompts in one step.")
    max_batch_size: int = Field(description="The most requests that are computed at one time.")
    waiting_served_ratio: float = Field(
        description="Waiting requests join when there are this many times as many as running "
        "ones. Only without prefill chunking."
    )
    max_waiting_tokens: int = Field(
        description="Steps after which waiting requests join at any ratio. Only without prefill "
        "chunking."
    )
    model_dtype: str = Field(description="The number type that the model computes with.")
    model_device_type: str = Field(description="What the model runs on.")
    model_vocab_size: int = Field(description="Tokens in the vocabulary.")
    num_shard: int = Field(description="Processes that the model is divided over.")
    block_size: int = Field(description="Tokens in one block of the cache.")
    num_blocks: int = Field(description="Blocks in the cache.")
    attention_impl: str = Field(description="How attention is computed.")
    features: dict[str, str] = Field(
        description="What is on and what is off, and why.",
        examples=[{"prefix_caching": "on", "speculation": "off: start with --speculate N"}],
    )


def features(services: Services) -> dict[str, str]:
    """Each is `on` or `off`, and where there is something to say, a colon and that."""
    config, shard = services.config, services.info
    return {
        "prefix_caching": _prefix_caching(services),
        "prefill_chunking": _unless(
            config.disable_prefill_chunking, "--disable-prefill-chunking was given"
        ),
        "speculation": _speculation(services),
        "async_scheduling": _unless(
            not shard.spares_core,
            "the model computes on every core, and the router's work would delay it",
        ),
        "native_model": _unless(bool(shard.not_native), shard.not_native),
        "quantization": (
            f"on: {shard.quantize}" if shard.quantize else "off: start with --quantize"
        ),
        "deterministic": (
            "on"
            if shard.deterministic
            else "off: this device's operators round differently in other batches"
        ),
        "grammars": _unless(config.disable_grammar_support, "--disable-grammar-support was given"),
        "cuda_graphs": _cuda_graphs(services),
        "lora_adapters": "off: not supported yet",
    }


def _speculation(services: Services) -> str:
    if services.info.keeps_state:
        return "off: this model keeps a state per request, which wrong draft tokens would change"
    if num_tokens := services.config.speculate:
        return f"on: up to {num_tokens} draft tokens per request and step"
    return "off: start with --speculate N"


def _prefix_caching(services: Services) -> str:
    shard = services.info
    if services.config.disable_prefix_caching:
        return "off: --disable-prefix-caching was given"
    if shard.recompute_at is not None:
        return (
            f"on: but not for requests that can grow from at most {shard.recompute_at} tokens to "
            "more, whose KV this model computes anew on the way"
        )
    if shard.prompt_scaled_at is not None:
        return (
            f"on: but prompts of more than {shard.prompt_scaled_at} tokens share only with prompts "
            "as long, because this model stretches its context by their length"
        )
    if (num_snapshots := services.scheduler_limits.num_snapshots) is not None:
        if not num_snapshots:
            return "off: there is no memory for a snapshot of the state that this model keeps"
        return f"on: behind one of {num_snapshots} snapshots of the state that this model keeps"
    return "on"


def _cuda_graphs(services: Services) -> str:
    shard = services.info
    if shard.records_steps:
        return "on"
    if shard.device_type == "cpu":
        return "off: the model runs on a CPU"
    return "off: --cuda-graphs 0 was given, or not every pass of this model can be recorded"


def _unless(is_off: bool, reason: str) -> str:
    return f"off: {reason}" if is_off else "on"


KSERVE_MODEL = "/v2/models/{model_name:model}"
VERSION_PATH = f"{KSERVE_MODEL}/versions/{{model_version}}"
# The server has one model, in one version; any is taken for it.
ONLY_VERSION = "1"
_SERVER = "text-generation-inference"
INPUT, OUTPUT = "text_input", "text_output"
"""What tensors are called that have no name of their own."""

HEALTH_TIMEOUT_S = 5

_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorResponse, "description": "Service not ready"}
}

# Health, metrics and probes need no key.
router = APIRouter(tags=["Text Generation Inference"])
key_router = APIRouter(dependencies=NEEDS_KEY, tags=["Text Generation Inference"])
kserve_router = APIRouter(tags=["KServe"])
kserve_key_router = APIRouter(dependencies=NEEDS_KEY, tags=["KServe"])


@get(router, "/", include_in_schema=False)
@get(router, "/ping", include_in_schema=False)
@get(
    router,
    "/health",
    summary="Health check method",
    response_class=Response,
    responses=_UNHEALTHY,
)
async def health(services: ServicesDependency) -> Response:
    """200 while every shard takes work and the scheduler runs."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            is_healthy = await services.batcher.probe()
    except TimeoutError:
        is_healthy = False
    if not is_healthy:
        raise UnhealthyError
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
    config, shard = services.config, services.info
    # Most fields are called as there.
    known: dict[str, Any] = {}
    for source in (config, services.limits, services.scheduler_limits):
        known |= {field.name: getattr(source, field.name) for field in fields(source)}
    known |= {
        "model_id": config.served_model_id,
        "model_sha": config.revision,
        "model_pipeline_tag": None,
        "router": "text-generation-router",
        "version": VERSION,
        "sha": None,
        "docker_label": None,
        "model_dtype": shard.dtype,
        "model_device_type": shard.device_type,
        "model_vocab_size": shard.vocab_size,
        "num_shard": shard.world_size,
        "attention_impl": shard.attention_impl,
        "features": features(services),
    }
    answer = InfoResponse(**known)
    return Response(answer.model_dump_json(), media_type="application/json")


@get(router, "/metrics", summary="Prometheus metrics scrape endpoint", response_class=Response)
async def metrics(services: ServicesDependency) -> Response:
    """Every metric in Prometheus' text format."""
    return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE})


_ANSWERS: dict[str, Any] = {"responses": {503: {"description": "Not so; the body is the same"}}}


def probe_answer(state: ServerState, is_so: bool) -> Response:
    """200 or 503, and how the server is: `state` (starting, ready, degraded, draining or failed),
    `phase` (in words), `since`, and while a model is loaded `progress`."""
    return Response(
        orjson.dumps(state.as_json()),
        200 if is_so else 503,
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )


@get(router, "/livez", summary="Whether work that waits goes on", **_ANSWERS)
async def livez(services: ServicesDependency) -> Response:
    """503 if work waits and no step has ended within the deadline, or the scheduler has failed."""
    state = services.state
    stalled_s = min(services.batcher.stalled_s, state.age_s)
    is_stuck = state.state is State.READY and stalled_s > services.stall_s
    return probe_answer(state, state.state is not State.FAILED and not is_stuck)


@get(router, "/readyz", summary="Whether requests are taken and computed", **_ANSWERS)
async def readyz(services: ServicesDependency) -> Response:
    """503 while the server starts, its shards are down, it drains or has failed."""
    return probe_answer(services.state, services.state.state is State.READY)


@get(router, "/startupz", summary="Whether the server has started", **_ANSWERS)
async def startupz(services: ServicesDependency) -> Response:
    """503 until it was ready for the first time."""
    return probe_answer(services.state, services.state.has_started)


class _ModelName(StringConvertor):
    """Names of models may have a few slashes; what may follow them in a path is no part of them."""

    regex = "[^/]+(?:/(?!(?:versions|infer|ready|config|stats)(?:/|$))[^/]+){0,7}"


register_url_convertor("model", _ModelName())


@get(kserve_router, "/v2/health/live", summary="Liveness")
async def kserve_live() -> Response:
    """The process answers, whatever its shards do."""
    return json_response({"live": True})


@get(kserve_router, "/v2/health/ready", summary="Readiness", responses=_UNHEALTHY)
async def kserve_ready(services: ServicesDependency) -> Response:
    """Every shard takes work and the scheduler runs."""
    await health(services)
    return json_response({"live": True})


@get(kserve_router, f"{VERSION_PATH}/ready", summary="Readiness of the model", responses=_UNHEALTHY)
async def kserve_model_ready(
    model_name: str, model_version: str, services: ServicesDependency
) -> Response:
    """The same as the readiness of the server, which has one model; any name and version do."""
    return await kserve_ready(services)


@get(kserve_key_router, "/v2", summary="Server metadata", responses=UNAUTHORIZED)
async def kserve_metadata() -> Response:
    """What the server is."""
    extensions = ["health", "models", "metrics"]
    return json_response({"name": _SERVER, "version": VERSION, "extensions": extensions})


@get(kserve_key_router, VERSION_PATH, summary="Model metadata", responses=UNAUTHORIZED)
async def kserve_model_metadata(model_name: str, model_version: str) -> Response:
    """The name and the version from the path, since the server has one model."""
    extensions = ["infer", "ready"]
    return json_response({"name": model_name, "version": model_version, "extensions": extensions})


@get(
    kserve_router,
    f"{KSERVE_MODEL}/ready",
    summary="Readiness of the model in any version",
    responses=STATUSES,
)
async def kserve_any_version_ready(model_name: str, services: ServicesDependency) -> Response:
    """The same as the readiness of the server. It needs no key, and so shows no name."""
    try:
        check_model(model_name, services)
    except ModelNotFoundError:
        raise HTTPException(404) from None
    return await kserve_ready(services)


@get(kserve_key_router, KSERVE_MODEL, summary="Model metadata of the protocol", responses=STATUSES)
async def kserve_any_version_metadata(model_name: str, services: ServicesDependency) -> Response:
    """The tensors that the model takes and gives; inputs and outputs may have other names."""
    check_model(model_name, services)
    texts = {"datatype": "BYTES", "shape": [-1]}
    return json_response(
        {
            "name": model_name,
            "versions": [ONLY_VERSION],
            "platform": _SERVER,
            "inputs": [{"name": INPUT, **texts}],
            "outputs": [{"name": OUTPUT, **texts}],
        }
    )
