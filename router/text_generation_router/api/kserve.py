"""KServe's Open Inference Protocol (v2): text goes in and comes out as lists of UTF-8 bytes."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.bounded import Items, Numbers
from text_generation_router.api.generate import (
    ERRORS,
    UNAUTHORIZED,
    ServicesDependency,
    at_once,
    generate_answer,
    unless_disconnected,
)
from text_generation_router.api.info import UNHEALTHY, check_health, get
from text_generation_router.api.keys import KeyRoute
from text_generation_router.api.schemas import Body, GenerateParametersBody, GenerateRequest, Uint64
from text_generation_router.config import VERSION
from text_generation_router.errors import RouterError, ValidationError
from text_generation_router.services import Services

Byte = Annotated[int, Field(ge=0, le=255)]

_MODEL = "/v2/models/{model_name}/versions/{model_version}"

# Health is open to everybody.
router = APIRouter(tags=["KServe"])
key_router = APIRouter(route_class=KeyRoute, tags=["KServe"])
body_router = APIRouter(route_class=JsonRoute, tags=["KServe"])


class Utf8Error(RouterError):
    """An input whose bytes are no text."""

    status_code = 422
    error_type = "utf8"
    metric_label = "validation"


class LengthMismatchError(RouterError):
    """Not as many outputs are named as there are inputs."""

    status_code = 422
    error_type = "length mismatch"
    metric_label = "validation"


class InputTensor(Body):
    """One prompt."""

    name: str = Field(description="Any name.")
    shape: Numbers[Uint64] = Field(description="Not read.", examples=[[1, 5]])
    datatype: str = Field(description="Not read.", examples=["UINT8"])
    data: Numbers[Byte] = Field(
        description="The prompt, as bytes of UTF-8.", examples=[list(b"Hello")]
    )


class OutputName(Body):
    """What the answer to the input at the same place is to be called."""

    name: str = Field(description="The name.")


class InferenceRequest(Body):
    """Body of an inference; the parameters are those of /generate, and the same for all inputs."""

    id: str = Field(description="Any id. The answer has the same.")
    inputs: Items[InputTensor] = Field(description="The prompts.")
    outputs: Items[OutputName] = Field(
        description="A name for each answer, as many as there are inputs."
    )
    parameters: GenerateParametersBody = Field(
        default_factory=lambda: GenerateParametersBody(do_sample=True),
        description="How to generate. `details` and `decoder_input_details` are refused.",
    )


class OutputTensor(BaseModel):
    """One generated text."""

    name: str = Field(description="The name that the request gave.")
    shape: list[int] = Field(description="1, and the number of bytes.", examples=[[1, 5]])
    datatype: str = Field(description="Always BYTES.", examples=["BYTES"])
    data: list[int] = Field(description="The text, as bytes of UTF-8.")


class InferenceResponse(BaseModel):
    """The generated texts in the order of the inputs."""

    id: str = Field(description="As in the request.")
    outputs: list[OutputTensor] = Field(description="One for each input.")


class LiveResponse(BaseModel):
    """The server answers."""

    live: bool = Field(
        description="Always true. A server that is not ready answers with another status."
    )


class MetadataServerResponse(BaseModel):
    """What the server is."""

    name: str = Field(description="The server, or the model of the path.")
    version: str = Field(description="The version of the server, or of the path.")
    extensions: list[str] = Field(description="What is supported.")


@get(router, "/v2/health/live", summary="Liveness", response_model=LiveResponse)
async def kserve_live() -> Response:
    """The process answers, whatever its shards do."""
    return _json({"live": True})


@get(
    router,
    "/v2/health/ready",
    summary="Readiness",
    response_model=LiveResponse,
    responses=UNHEALTHY,
)
async def kserve_ready(services: ServicesDependency) -> Response:
    """Every shard takes work and the scheduler runs."""
    await check_health(services)
    return _json({"live": True})


@get(
    router,
    f"{_MODEL}/ready",
    summary="Readiness of the model",
    response_model=LiveResponse,
    responses=UNHEALTHY,
)
async def kserve_model_ready(
    model_name: str, model_version: str, services: ServicesDependency
) -> Response:
    """The same as the readiness of the server, which has one model; any name and version do."""
    return await kserve_ready(services)


@get(
    key_router,
    "/v2",
    summary="Server metadata",
    response_model=MetadataServerResponse,
    responses=UNAUTHORIZED,
)
async def kserve_metadata() -> Response:
    """What the server is."""
    extensions = ["health", "models", "metrics"]
    name = "text-generation-inference"
    return _json({"name": name, "version": VERSION, "extensions": extensions})


@get(
    key_router,
    _MODEL,
    summary="Model metadata",
    response_model=MetadataServerResponse,
    responses=UNAUTHORIZED,
)
async def kserve_model_metadata(model_name: str, model_version: str) -> Response:
    """The name and the version from the path, since the server has one model."""
    extensions = ["infer", "ready"]
    return _json({"name": model_name, "version": model_version, "extensions": extensions})


@body_router.post(
    f"{_MODEL}/infer", summary="Inference", response_model=InferenceResponse, responses=ERRORS
)
async def kserve_infer(
    model_name: str,
    model_version: str,
    body: InferenceRequest,
    request: Request,
    services: ServicesDependency,
) -> Response:
    """Generates for every input; any model name and version do, since the server has one model."""
    services.metrics.request_count.inc()
    if len(body.inputs) != len(body.outputs):
        raise LengthMismatchError("Inputs and outputs length mismatch")
    if body.parameters.details or body.parameters.decoder_input_details:
        raise ValidationError("`details` has no place in this answer; use /generate for it")
    services.infer.check_could_fit(len(body.inputs))
    work = at_once(_generate(item, services) for item in _requests(body))
    texts = await unless_disconnected(request, work)
    if texts is None:
        return Response(status_code=499)
    outputs: list[dict[str, Any]] = [
        {"name": output.name, "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)}
        for output, text in zip(body.outputs, texts, strict=True)
    ]
    return _json({"id": body.id, "outputs": outputs})


def _requests(body: InferenceRequest) -> list[GenerateRequest]:
    try:
        return [
            GenerateRequest(inputs=bytes(tensor.data).decode(), parameters=body.parameters)
            for tensor in body.inputs
        ]
    except UnicodeDecodeError as error:
        raise Utf8Error(f"`data` must be text in UTF-8; it is not: {error}") from error


async def _generate(request: GenerateRequest, services: Services) -> bytes:
    asked = request.to_parameters()
    best, others = await services.infer.generate_best_of(asked)
    text = generate_answer(best, others, asked)["generated_text"]
    assert isinstance(text, str)
    return text.encode()


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
