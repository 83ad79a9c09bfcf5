"""KServe's Open Inference Protocol (v2): tensors of texts go in, and come out, in JSON, or binary
behind the JSON of a body. Described of its bodies is only what is this server's own.

TGI has its own form of it, in which the tensors of a request and of its answer are lists of
UTF-8 bytes, one text each. What TGI takes is answered as TGI does; all else is the protocol's.

The binary form is Triton's extension: the header `Inference-Header-Content-Length` tells how long
the JSON is, and `binary_data_size` of a tensor how many bytes behind it are its own. An element of
a BYTES tensor is its length, four bytes with the lowest first, and its bytes.
"""

import math
import struct
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, cast

import orjson
from fastapi import Request, Response
from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.datastructures import Headers

from text_generation_router.api.answers import json_response
from text_generation_router.api.body import (
    IGNORED,
    BodyError,
    Hint,
    Parser,
    media_type,
    parsed,
    short,
    warning,
)
from text_generation_router.api.errors import OPEN_INFERENCE, STATUSES, TGI_ERRORS, RequestError
from text_generation_router.api.models import check_model
from text_generation_router.api.routes import JsonRoute, ServicesDependency, post_router
from text_generation_router.api.tgi.generate import (
    GenerateParametersBody,
    GenerateRequest,
    generate_answer,
)
from text_generation_router.api.tgi.info import KSERVE_MODEL, ONLY_VERSION, OUTPUT, VERSION_PATH
from text_generation_router.errors import BadRequestError, ValidationError
from text_generation_router.fields import MAX_ITEMS, Body, Items, Numbers, Refused, Uint64
from text_generation_router.infer import gather_or_cancel
from text_generation_router.services import Services

_HEADER_LENGTH = "inference-header-content-length"
_BINARY = "application/octet-stream"
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 8


def _kind(data: Any) -> str:
    return "texts" if isinstance(data, list) and data and isinstance(data[0], str) else "bytes"


def _flat(data: Any) -> Any:
    """The elements of a tensor, which JSON may have in lists of lists. Raises ValueError."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            raise ValueError("rows and elements are mixed; send all rows, or all elements")
        data = list(chain.from_iterable(data))
    return data


Data = Annotated[
    Annotated[Numbers[Annotated[int, Field(ge=0, le=255)]], Tag("bytes")]
    | Annotated[Items[str], Tag("texts")],
    Discriminator(_kind),
    BeforeValidator(_flat),
]


class TensorParameters(Body):
    """Where the data of a tensor is: `binary_data_size` bytes behind the JSON of the body."""

    binary_data_size: Uint64 | None = None
    shared_memory_region: Refused = None


class InputTensor(Body):
    """Texts, one for each element of a BYTES tensor; or one text, all bytes of a UINT8 tensor."""

    name: str
    shape: Numbers[Uint64]
    datatype: str
    parameters: TensorParameters | None = None
    data: Data

    @property
    def has_bytes(self) -> bool:
        """Whether the data is the bytes of one text."""
        return _kind(self.data) == "bytes"


class OutputParameters(Body):
    """Whether an output is to be sent behind the JSON. Default: `binary_data_output`."""

    binary_data: bool | None = None
    classification: Refused = None
    shared_memory_region: Refused = None


class OutputName(Body):
    """What the answer to the input at the same place is to be called."""

    name: str
    parameters: OutputParameters | None = None


class InferenceParameters(GenerateParametersBody):
    """The parameters of /generate, and the protocol's own."""

    binary_data_output: bool | None = None
    priority: Annotated[Any, Hint(0), IGNORED] = None
    timeout: Annotated[Any, Hint(), IGNORED] = None
    sequence_id: Refused = None


# With nothing but these the parameters count as left out.
_PROTOCOLS = InferenceParameters.model_fields.keys() - GenerateParametersBody.model_fields.keys()


class InferenceRequest(Body):
    """Body of an inference; the parameters are those of /generate, and the same for all inputs.
    As many outputs are named as there are inputs, or none."""

    id: str | None = None
    inputs: Items[InputTensor]
    outputs: Items[OutputName] | None = None
    parameters: InferenceParameters = Field(
        default_factory=lambda: InferenceParameters(do_sample=True),
        description="How to generate. `details` and `decoder_input_details` are refused.",
    )


def _is_json(headers: Headers) -> bool:
    """Whether all of a body is JSON, and says so. Triton's client says what it sends in
    `Inference-Header-Content-Length` alone."""
    return _HEADER_LENGTH not in headers and media_type(headers) not in ("", _BINARY)


class TensorRoute(JsonRoute):
    """A route whose body is JSON, with or without binary tensors behind it."""

    def parser(self, headers: Headers) -> Parser:
        """Puts binary tensors where those in JSON are. Raises BodyError."""
        if _is_json(headers):
            return super().parser(headers)
        given = headers.get(_HEADER_LENGTH)
        if given is None:
            return parsed
        if not (given.isascii() and given.isdecimal() and len(given) < 16):
            raise BodyError(
                400,
                f"`Inference-Header-Content-Length` must be a number of bytes. Given: "
                f"{short(given)}",
            )
        return partial(_parsed_with_tensors, json_length=int(given))


def _parsed_with_tensors(body: bytes | bytearray, json_length: int) -> Any:
    """The JSON of a body, its binary tensors as `data`. Raises BodyError."""
    value = parsed(body[:json_length])
    tensors = value.get("inputs") if isinstance(value, dict) else None
    if not isinstance(tensors, list):
        tensors = []
    sizes = [_binary_size(tensor) for tensor in tensors]
    if json_length + sum(size or 0 for size in sizes) != len(body):
        raise BodyError(
            400,
            "`Inference-Header-Content-Length` and `binary_data_size` of all tensors must be the "
            f"length of the body, {len(body)} bytes",
        )
    start = json_length
    for tensor, size in zip(tensors, sizes, strict=True):
        if size is None:
            continue
        if "data" in tensor:
            raise BodyError(400, f"{_named(tensor)} has both `data` and `binary_data_size`")
        tensor["data"] = _elements(tensor, memoryview(body)[start : start + size])
        start += size
    return value


def _named(tensor: dict[str, Any]) -> str:
    return f"The tensor {short(str(tensor.get('name')))!r}"


def _binary_size(tensor: Any) -> int | None:
    """None for a tensor whose data is in the JSON, or that is none. Raises BodyError."""
    if not isinstance(tensor, dict) or not isinstance(tensor.get("parameters"), dict):
        return None
    size = tensor["parameters"].get("binary_data_size")
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BodyError(400, f"{_named(tensor)}: `binary_data_size` must be a number of bytes")
    return size


def _elements(tensor: dict[str, Any], data: memoryview) -> list[str] | list[int]:
    """The texts of a BYTES tensor; the bytes of any other. Raises BodyError."""
    if tensor.get("datatype") != "BYTES":
        return list(data)
    texts: list[str] = []
    start = 0
    while start < len(data):
        if len(texts) == MAX_ITEMS:
            raise BodyError(400, f"{_named(tensor)} has more than {MAX_ITEMS} elements; send fewer")
        begin = start + _LENGTH.size
        end = begin + (_LENGTH.unpack(data[start:begin])[0] if begin <= len(data) else 0)
        if max(begin, end) > len(data):
            raise BodyError(400, f"{_named(tensor)} ends within an element")
        try:
            texts.append(str(data[begin:end], "utf-8"))
        except UnicodeDecodeError as error:
            raise BodyError(
                400,
                f"{_named(tensor)} must be texts in UTF-8; element {len(texts)} is not: {error}",
            ) from None
        start = end
    return texts


tgi_router = post_router("KServe", TGI_ERRORS, TensorRoute)
open_router = post_router("KServe", STATUSES, TensorRoute)


class Utf8Error(BadRequestError):
    """An input whose bytes are no text."""

    error_type = "utf8"


class LengthMismatchError(BadRequestError):
    """Not as many outputs are named as there are inputs."""

    error_type = "length mismatch"


@tgi_router.post(f"{VERSION_PATH}/infer", summary="Inference")
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


@open_router.post(f"{KSERVE_MODEL}/infer", summary="Inference by the protocol")
async def kserve_any_version_infer(
    model_name: str, body: InferenceRequest, services: ServicesDependency
) -> Response:
    """Generates for every element of every input."""
    services.metrics.request_count.inc()
    return await _infer(model_name, ONLY_VERSION, body, services)


def _is_tgis(body: InferenceRequest, request: Request) -> bool:
    """Whether TGI takes it: JSON that has `id` and `outputs`, bytes as data, and asks for no binary
    output."""
    if body.id is None or body.outputs is None or not _is_json(Headers(scope=request.scope)):
        return False
    is_binary = any(_is_binary(body, place) for place in range(len(body.outputs)))
    return not is_binary and all(tensor.has_bytes for tensor in body.inputs)


async def _infer(
    model_name: str, model_version: str, body: InferenceRequest, services: Services
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
            elements = map(str.encode, part)
            binary.append(b"".join(_LENGTH.pack(len(one)) + one for one in elements))
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = part
        outputs.append(output)
    text = orjson.dumps(answer)
    headers = {"content-type": "application/json"}
    if binary:
        headers = {"content-type": _BINARY, _HEADER_LENGTH: str(len(text))}
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
    if body.parameters.model_fields_set and body.parameters.model_fields_set <= _PROTOCOLS:
        parameters = GenerateParametersBody(do_sample=True)

    async def generate(prompt: str) -> str:
        asked = GenerateRequest(inputs=prompt, parameters=parameters).to_parameters()
        best, others = await services.infer.generate_best_of(asked, services.options)
        answer = generate_answer(best, others, asked)
        return cast(str, answer["generated_text"])

    return await gather_or_cancel(map(generate, prompts))
