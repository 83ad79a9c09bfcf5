"""KServe's Open Inference Protocol (v2): tensors of texts go in, and come out.

TGI has its own form of it, in which the tensors of a request and of its answer are lists of
UTF-8 bytes, one text each. What TGI takes is answered as TGI does; all else is the protocol's.
"""

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, cast

import orjson
from fastapi import APIRouter, HTTPException, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.datastructures import Headers

from text_generation_router.api.answers import json_response
from text_generation_router.api.body import warning
from text_generation_router.api.errors import (
    OPEN_INFERENCE,
    STATUSES,
    TGI_ERRORS,
    UNAUTHORIZED,
    ModelNotFoundError,
    RequestError,
)
from text_generation_router.api.models import check_model
from text_generation_router.api.platforms.kserve_tensors import (
    BINARY,
    HEADER_LENGTH,
    INPUT,
    OUTPUT,
    PROTOCOLS,
    InferenceRequest,
    InputTensor,
    TensorRoute,
    is_json,
    written,
)
from text_generation_router.api.routes import ServicesDependency, get, post_router
from text_generation_router.api.tgi.generate import (
    GenerateParametersBody,
    GenerateRequest,
    generate_answer,
)
from text_generation_router.api.tgi.info import UNHEALTHY, check_health
from text_generation_router.config import VERSION
from text_generation_router.edge.keys import NEEDS_KEY
from text_generation_router.errors import BadRequestError, ValidationError
from text_generation_router.infer import gather_or_cancel
from text_generation_router.services import Services


class _ModelName(StringConvertor):
    """Names of models may have a few slashes; what may follow them in a path is no part of them."""

    regex = "[^/]+(?:/(?!(?:versions|infer|ready|config|stats)(?:/|$))[^/]+){0,7}"


register_url_convertor("model", _ModelName())

_MODEL = "/v2/models/{model_name:model}"
_VERSION = f"{_MODEL}/versions/{{model_version}}"
_MOST_DIMENSIONS = 8
# The server has one model, in one version; any is taken for it.
_ONLY_VERSION = "1"
_SERVER = "text-generation-inference"

# Health needs no key.
router = APIRouter(tags=["KServe"])
key_router = APIRouter(dependencies=NEEDS_KEY, tags=["KServe"])
tgi_router = post_router("KServe", TGI_ERRORS, TensorRoute)
open_router = post_router("KServe", STATUSES, TensorRoute)


class Utf8Error(BadRequestError):
    """An input whose bytes are no text."""

    error_type = "utf8"


class LengthMismatchError(BadRequestError):
    """Not as many outputs are named as there are inputs."""

    error_type = "length mismatch"


@get(router, "/v2/health/live", summary="Liveness")
async def kserve_live() -> Response:
    """The process answers, whatever its shards do."""
    return json_response({"live": True})


@get(router, "/v2/health/ready", summary="Readiness", responses=UNHEALTHY)
async def kserve_ready(services: ServicesDependency) -> Response:
    """Every shard takes work and the scheduler runs."""
    await check_health(services)
    return json_response({"live": True})


@get(router, f"{_VERSION}/ready", summary="Readiness of the model", responses=UNHEALTHY)
async def kserve_model_ready(
    model_name: str, model_version: str, services: ServicesDependency
) -> Response:
    """The same as the readiness of the server, which has one model; any name and version do."""
    return await kserve_ready(services)


@get(key_router, "/v2", summary="Server metadata", responses=UNAUTHORIZED)
async def kserve_metadata() -> Response:
    """What the server is."""
    extensions = ["health", "models", "metrics"]
    return json_response({"name": _SERVER, "version": VERSION, "extensions": extensions})


@get(key_router, _VERSION, summary="Model metadata", responses=UNAUTHORIZED)
async def kserve_model_metadata(model_name: str, model_version: str) -> Response:
    """The name and the version from the path, since the server has one model."""
    extensions = ["infer", "ready"]
    return json_response({"name": model_name, "version": model_version, "extensions": extensions})


@get(
    router,
    f"{_MODEL}/ready",
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


@get(key_router, _MODEL, summary="Model metadata of the protocol", responses=STATUSES)
async def kserve_any_version_metadata(model_name: str, services: ServicesDependency) -> Response:
    """The tensors that the model takes and gives; inputs and outputs may have other names."""
    check_model(model_name, services)
    texts = {"datatype": "BYTES", "shape": [-1]}
    return json_response(
        {
            "name": model_name,
            "versions": [_ONLY_VERSION],
            "platform": _SERVER,
            "inputs": [{"name": INPUT, **texts}],
            "outputs": [{"name": OUTPUT, **texts}],
        }
    )


@tgi_router.post(f"{_VERSION}/infer", summary="Inference")
async def kserve_infer(
    model_name: str,
    model_version: str,
    body: InferenceRequest,
    request: Request,
    services: ServicesDependency,
) -> Response:
    """Generates for every input, as TGI does for what TGI takes, else by the protocol."""
    services.metrics.request_count.inc()
    if not _is_tgis(body, request):
        request.scope[OPEN_INFERENCE] = True
        return await _infer(model_name, model_version, body, services)
    outputs = body.outputs or []
    if len(body.inputs) != len(outputs):
        raise LengthMismatchError("Inputs and outputs length mismatch")
    prompts = [text for tensor in body.inputs for text in _texts(tensor)]
    texts = await _generate_all(body, prompts, services)
    made: list[dict[str, Any]] = [
        {"name": output.name, "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)}
        for output, text in zip(outputs, map(str.encode, texts), strict=True)
    ]
    return json_response({"id": body.id, "outputs": made}, warning(body))


@open_router.post(f"{_MODEL}/infer", summary="Inference by the protocol")
async def kserve_any_version_infer(
    model_name: str, body: InferenceRequest, services: ServicesDependency
) -> Response:
    """Generates for every element of every input."""
    services.metrics.request_count.inc()
    return await _infer(model_name, _ONLY_VERSION, body, services)


def _is_tgis(body: InferenceRequest, request: Request) -> bool:
    """Whether TGI takes it: JSON that has `id` and `outputs`, bytes as data, and asks for no binary
    output."""
    if body.id is None or body.outputs is None or not is_json(Headers(scope=request.scope)):
        return False
    is_binary = any(_is_binary(body, place) for place in range(len(body.outputs)))
    return not is_binary and all(tensor.has_bytes for tensor in body.inputs)


async def _infer(
    model_name: str,
    model_version: str,
    body: InferenceRequest,
    services: Services,
) -> Response:
    """The protocol's answer. Raises RouterError."""
    check_model(model_name, services)
    num = len(body.inputs)
    if not num:
        raise RequestError("`inputs` must have at least one tensor")
    names = [OUTPUT] if num == 1 else [f"{OUTPUT}_{place}" for place in range(num)]
    if body.outputs:
        names = [output.name for output in body.outputs]
    if len(names) != num:
        raise RequestError(
            "`outputs` must name one tensor for each of `inputs`, or be left out. Given: "
            f"{len(names)} outputs and {num} inputs"
        )
    prompts = [_checked_texts(tensor) for tensor in body.inputs]
    texts = iter(await _generate_all(body, [*chain(*prompts)], services))
    answer: dict[str, Any] = {"model_name": model_name, "model_version": model_version}
    if body.id is not None:
        answer["id"] = body.id
    answer["outputs"] = outputs = []
    binary: list[bytes] = []
    for place, (name, asked, tensor) in enumerate(zip(names, prompts, body.inputs, strict=True)):
        shape = [1] if tensor.has_bytes else tensor.shape
        output: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": shape}
        part = list(islice(texts, len(asked)))
        if _is_binary(body, place):
            binary.append(written(part))
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = part
        outputs.append(output)
    text = orjson.dumps(answer)
    headers = {"content-type": "application/json"}
    if binary:
        headers = {"content-type": BINARY, HEADER_LENGTH: str(len(text))}
    return Response(b"".join((text, *binary)), headers=headers | warning(body))


def _checked_texts(tensor: InputTensor) -> list[str]:
    """The texts of the tensor. Raises RequestError for one that contradicts itself, and
    Utf8Error."""
    named, shape, num = f"The input {tensor.name[:64]!r}", tensor.shape, len(tensor.data)
    is_bytes = tensor.datatype == "UINT8"
    if tensor.datatype != "BYTES" and not is_bytes:
        raise RequestError(
            f"{named} is {tensor.datatype[:16]!r}; send texts as BYTES, or the bytes of one as "
            "UINT8"
        )
    if not num:
        raise RequestError(f"{named} has no elements; send at least one text")
    if is_bytes and not tensor.has_bytes:
        raise RequestError(f"{named} is UINT8 and has texts; send them as BYTES")
    # TGI's clients send the bytes of a text as BYTES, in any shape.
    if is_bytes or not tensor.has_bytes:
        if len(shape) > _MOST_DIMENSIONS:
            raise RequestError(
                f"{named}: a tensor can have {_MOST_DIMENSIONS} dimensions. Given: {len(shape)}"
            )
        if (expected := math.prod(shape)) != num:
            raise RequestError(
                f"{named}: a tensor of shape {shape} has {expected} elements. Given: {num}"
            )
    return _texts(tensor)


def _texts(tensor: InputTensor) -> list[str]:
    """Raises Utf8Error."""
    if not tensor.has_bytes:
        return cast(list[str], tensor.data)
    try:
        return [bytes(cast(list[int], tensor.data)).decode()]
    except UnicodeDecodeError as error:
        raise Utf8Error(f"`data` must be text in UTF-8; it is not: {error}") from error


def _is_binary(body: InferenceRequest, place: int) -> bool:
    """Whether the output at a place goes behind the JSON."""
    asked = body.outputs[place].parameters if body.outputs else None
    if asked is not None and asked.binary_data is not None:
        return asked.binary_data
    return bool(body.parameters.binary_data_output)


async def _generate_all(
    body: InferenceRequest, prompts: Sequence[str], services: Services
) -> list[str]:
    """A text for each prompt. Raises RouterError."""
    if body.parameters.details or body.parameters.decoder_input_details:
        raise ValidationError("`details` has no place in this answer; use /generate for it")
    services.infer.check_could_fit(len(prompts), services.options)
    parameters: GenerateParametersBody = body.parameters
    if body.parameters.model_fields_set and body.parameters.model_fields_set <= PROTOCOLS:
        parameters = GenerateParametersBody(do_sample=True)

    async def generate(prompt: str) -> str:
        asked = GenerateRequest(inputs=prompt, parameters=parameters).to_parameters()
        best, others = await services.infer.generate_best_of(asked, services.options)
        answer = generate_answer(best, others, asked)
        return cast(str, answer["generated_text"])

    return await gather_or_cancel(map(generate, prompts))
