"""KServe's Open Inference Protocol (v2): tensors of texts go in, and come out.

TGI speaks a form of its own of it, in which the tensors of a request and of its answer are lists of
UTF-8 bytes, one text each. What TGI takes is answered as TGI does; all else is the protocol's.
"""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from starlette.convertors import StringConvertor, register_url_convertor

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
from text_generation_router.api.kserve_errors import ERRORS as OPEN_ERRORS
from text_generation_router.api.kserve_errors import InferenceError, mark_as_open
from text_generation_router.api.kserve_tensors import (
    TensorRequest,
    TensorRoute,
    flat,
    packed,
    shape_complaint,
    written,
)
from text_generation_router.api.openai.hints import IGNORED, Hint, warning
from text_generation_router.api.openai.models import check_model
from text_generation_router.api.openai.schemas import Refused
from text_generation_router.api.schemas import Body, GenerateParametersBody, GenerateRequest, Uint64
from text_generation_router.config import VERSION
from text_generation_router.errors import RouterError, ValidationError
from text_generation_router.services import Services

Byte = Annotated[int, Field(ge=0, le=255)]


class _ModelName(StringConvertor):
    """Names of models may have slashes; what may follow them in a path is no part of them."""

    regex = "[^/]+(?:/(?!(?:versions|infer|ready|config|stats)(?:/|$))[^/]+)*"


register_url_convertor("model", _ModelName())

_MODEL = "/v2/models/{model_name:model}"
_VERSION = f"{_MODEL}/versions/{{model_version}}"
_INPUT, _OUTPUT = "text_input", "text_output"
# The server has one model, in one version; any is taken for it.
_ONLY_VERSION = "1"

# Health is open to everybody.
router = APIRouter(tags=["KServe"])
key_router = APIRouter(route_class=KeyRoute, tags=["KServe"])
body_router = APIRouter(route_class=TensorRoute, tags=["KServe"])


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


def _kind(data: Any) -> str:
    return "texts" if isinstance(data, list) and data and isinstance(data[0], str) else "bytes"


Data = Annotated[
    Annotated[Numbers[Byte], Tag("bytes")] | Annotated[Items[str], Tag("texts")],
    Discriminator(_kind),
    BeforeValidator(flat),
]


class TensorParameters(Body):
    """Where the data of a tensor is."""

    binary_data_size: Uint64 | None = Field(
        default=None, description="So many bytes behind the JSON of the body."
    )
    shared_memory_region: Refused = None


class InputTensor(Body):
    """Texts, one for each element of a BYTES tensor; or one text, all bytes of a UINT8 tensor."""

    name: str
    shape: Numbers[Uint64] = Field(examples=[[1]])
    datatype: str = Field(examples=["BYTES"])
    parameters: TensorParameters | None = None
    data: Data = Field(description="Texts, or the bytes of one in UTF-8.", examples=[["Hello"]])

    @property
    def has_bytes(self) -> bool:
        """Whether the data is the bytes of one text."""
        return _kind(self.data) == "bytes"


class OutputParameters(Body):
    """How an output is to be sent."""

    binary_data: bool | None = Field(
        default=None, description="Behind the JSON of the answer. Default: `binary_data_output`."
    )
    classification: Refused = None
    shared_memory_region: Refused = None


class OutputName(Body):
    """What the answer to the input at the same place is to be called."""

    name: str
    parameters: OutputParameters | None = None


class InferenceParameters(GenerateParametersBody):
    """The parameters of /generate, and the protocol's own."""

    binary_data_output: bool | None = Field(
        default=None, description="Send outputs behind the JSON of the answer."
    )
    priority: Annotated[Any, Hint(0), IGNORED] = None
    timeout: Annotated[Any, Hint(), IGNORED] = None
    sequence_id: Refused = None


# With nothing but these the parameters count as left out.
_PROTOCOLS = InferenceParameters.model_fields.keys() - GenerateParametersBody.model_fields.keys()


class InferenceRequest(Body):
    """Body of an inference; the parameters are those of /generate, and the same for all inputs."""

    id: str | None = None
    inputs: Items[InputTensor]
    outputs: Items[OutputName] | None = Field(
        default=None, description=f"As many as there are inputs. Default: `{_OUTPUT}`."
    )
    parameters: InferenceParameters = Field(
        default_factory=lambda: InferenceParameters(do_sample=True)
    )


class OutputTensor(BaseModel):
    """Generated texts."""

    name: str
    shape: list[int] = Field(examples=[[1]])
    datatype: str = Field(examples=["BYTES"])
    parameters: dict[str, int] | None = None
    data: list[str] | list[int] = Field(
        default=[], description="Left out where it is binary. Bytes in TGI's form."
    )


class InferenceResponse(BaseModel):
    """The generated texts in the order of the inputs."""

    id: str | None = None
    model_name: str | None = Field(default=None, description="Not in TGI's form.")
    model_version: str | None = Field(default=None, description="Not in TGI's form.")
    outputs: list[OutputTensor]


class LiveResponse(BaseModel):
    """The server answers."""

    live: bool


class MetadataServerResponse(BaseModel):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor that the model takes or gives; -1: any size."""

    name: str
    datatype: str
    shape: list[int]


class MetadataModelResponse(BaseModel):
    """What the model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


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
    f"{_VERSION}/ready",
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
    _VERSION,
    summary="Model metadata",
    response_model=MetadataServerResponse,
    responses=UNAUTHORIZED,
)
async def kserve_model_metadata(model_name: str, model_version: str) -> Response:
    """The name and the version from the path, since the server has one model."""
    extensions = ["infer", "ready"]
    return _json({"name": model_name, "version": model_version, "extensions": extensions})


@get(
    router,
    f"{_MODEL}/ready",
    summary="Readiness of the model in any version",
    response_model=LiveResponse,
    responses=OPEN_ERRORS,
)
async def kserve_any_version_ready(model_name: str, services: ServicesDependency) -> Response:
    """The same as the readiness of the server."""
    check_model(model_name, services)
    return await kserve_ready(services)


@get(
    key_router,
    _MODEL,
    summary="Model metadata of the protocol",
    response_model=MetadataModelResponse,
    responses=OPEN_ERRORS,
)
async def kserve_any_version_metadata(
    model_name: str, services: ServicesDependency
) -> MetadataModelResponse:
    """The tensors that the model takes and gives; inputs and outputs may have other names."""
    check_model(model_name, services)
    return MetadataModelResponse(
        name=model_name,
        versions=[_ONLY_VERSION],
        platform="text-generation-inference",
        inputs=[TensorMetadata(name=_INPUT, datatype="BYTES", shape=[-1])],
        outputs=[TensorMetadata(name=_OUTPUT, datatype="BYTES", shape=[-1])],
    )


@body_router.post(
    f"{_VERSION}/infer", summary="Inference", response_model=InferenceResponse, responses=ERRORS
)
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
        mark_as_open(request.scope)
        return await _infer(model_name, model_version, body, request, services)
    outputs = body.outputs or []
    if len(body.inputs) != len(outputs):
        raise LengthMismatchError("Inputs and outputs length mismatch")
    texts = await _generate_all(body, _texts(body.inputs), request, services)
    if texts is None:
        return Response(status_code=499)
    made: list[dict[str, Any]] = [
        {"name": output.name, "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)}
        for output, text in zip(outputs, map(str.encode, texts), strict=True)
    ]
    return _json({"id": body.id, "outputs": made})


@body_router.post(
    f"{_MODEL}/infer",
    summary="Inference by the protocol",
    response_model=InferenceResponse,
    responses=OPEN_ERRORS,
)
async def kserve_any_version_infer(
    model_name: str, body: InferenceRequest, request: Request, services: ServicesDependency
) -> Response:
    """Generates for every element of every input."""
    services.metrics.request_count.inc()
    return await _infer(model_name, _ONLY_VERSION, body, request, services)


def _is_tgis(body: InferenceRequest, request: Request) -> bool:
    """Whether TGI takes it: JSON that has `id` and `outputs`, and bytes as data."""
    assert isinstance(request, TensorRequest)
    is_whole = body.id is not None and body.outputs is not None and request.is_json
    return is_whole and all(tensor.has_bytes for tensor in body.inputs)


async def _infer(
    model_name: str,
    model_version: str,
    body: InferenceRequest,
    request: Request,
    services: Services,
) -> Response:
    """The protocol's answer. Raises RouterError."""
    check_model(model_name, services)
    names = _output_names(body)
    sizes = [_num_texts(tensor) for tensor in body.inputs]
    texts = await _generate_all(body, _texts(body.inputs), request, services)
    if texts is None:
        return Response(status_code=499)
    answer: dict[str, Any] = {"model_name": model_name, "model_version": model_version}
    if body.id is not None:
        answer["id"] = body.id
    answer["outputs"] = outputs = []
    binary: list[bytes] = []
    start = 0
    for place, (name, size, tensor) in enumerate(zip(names, sizes, body.inputs, strict=True)):
        shape = [1] if tensor.has_bytes else tensor.shape
        output: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": shape}
        part = texts[start : start + size]
        start += size
        if _is_binary(body, place):
            binary.append(written(part))
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = part
        outputs.append(output)
    content, headers = packed(answer, binary)
    return Response(content, headers=headers | warning(body))


def _output_names(body: InferenceRequest) -> Sequence[str]:
    """What the outputs are called. Raises InferenceError."""
    num = len(body.inputs)
    if not num:
        raise InferenceError("`inputs` must have at least one tensor")
    if not body.outputs:
        return [_OUTPUT] if num == 1 else [f"{_OUTPUT}_{place}" for place in range(num)]
    if len(body.outputs) != num:
        raise InferenceError(
            "`outputs` must name one tensor for each of `inputs`, or be left out. Given: "
            f"{len(body.outputs)} outputs and {num} inputs"
        )
    return [output.name for output in body.outputs]


def _num_texts(tensor: InputTensor) -> int:
    """How many texts the tensor has. Raises InferenceError for one that contradicts itself."""
    told = f"The input {tensor.name[:64]!r}"
    is_bytes = tensor.datatype == "UINT8"
    if tensor.datatype != "BYTES" and not is_bytes:
        raise InferenceError(
            f"{told} is {tensor.datatype[:16]!r}; send texts as BYTES, or the bytes of one as UINT8"
        )
    if not tensor.data:
        raise InferenceError(f"{told} has no elements; send at least one text")
    if is_bytes and not tensor.has_bytes:
        raise InferenceError(f"{told} is UINT8 and has texts; send them as BYTES")
    # TGI's clients send the bytes of a text as BYTES, in any shape.
    is_checked = is_bytes or not tensor.has_bytes
    if is_checked and (complaint := shape_complaint(tensor.shape, len(tensor.data))):
        raise InferenceError(f"{told}: {complaint}")
    return 1 if tensor.has_bytes else len(tensor.data)


def _is_binary(body: InferenceRequest, place: int) -> bool:
    """Whether the output at a place goes behind the JSON."""
    asked = body.outputs[place].parameters if body.outputs else None
    if asked is not None and asked.binary_data is not None:
        return asked.binary_data
    return bool(body.parameters.binary_data_output)


def _texts(tensors: Sequence[InputTensor]) -> list[str]:
    """The prompts. Raises Utf8Error."""
    texts: list[str] = []
    for tensor in tensors:
        if not tensor.has_bytes:
            texts += cast(list[str], tensor.data)
            continue
        try:
            texts.append(bytes(cast(list[int], tensor.data)).decode())
        except UnicodeDecodeError as error:
            raise Utf8Error(f"`data` must be text in UTF-8; it is not: {error}") from error
    return texts


async def _generate_all(
    body: InferenceRequest, prompts: Sequence[str], request: Request, services: Services
) -> list[str] | None:
    """A text for each prompt; None if nobody waits for them any more. Raises RouterError."""
    if body.parameters.details or body.parameters.decoder_input_details:
        raise ValidationError("`details` has no place in this answer; use /generate for it")
    services.infer.check_could_fit(len(prompts))
    parameters: GenerateParametersBody = body.parameters
    if body.parameters.model_fields_set and body.parameters.model_fields_set <= _PROTOCOLS:
        parameters = GenerateParametersBody(do_sample=True)
    asked = [GenerateRequest(inputs=prompt, parameters=parameters) for prompt in prompts]
    return await unless_disconnected(request, at_once(_generate(one, services) for one in asked))


async def _generate(request: GenerateRequest, services: Services) -> str:
    asked = request.to_parameters()
    best, others = await services.infer.generate_best_of(asked)
    text = generate_answer(best, others, asked)["generated_text"]
    assert isinstance(text, str)
    return text


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
