"""Bodies of the Open Inference Protocol, and of TGI's form of it; described is only what is this
server's own. Their tensors are texts in JSON, or binary behind the JSON of a body.

The binary form is Triton's extension: the header `Inference-Header-Content-Length` tells how long
the JSON is, and `binary_data_size` of a tensor how many bytes behind it are its own. An element of
a BYTES tensor is its length, four bytes with the lowest first, and its bytes.
"""

import struct
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.datastructures import Headers

from text_generation_router.api.body import (
    IGNORED,
    BodyError,
    Hint,
    Parser,
    media_type,
    parsed,
    short,
)
from text_generation_router.api.routes import JsonRoute
from text_generation_router.api.tgi.generate import GenerateParametersBody
from text_generation_router.fields import MAX_ITEMS, Body, Items, Numbers, Refused, Uint64

HEADER_LENGTH = "inference-header-content-length"
BINARY = "application/octet-stream"
_LENGTH = struct.Struct("<I")


INPUT, OUTPUT = "text_input", "text_output"
"""What tensors are called that have no name of their own."""

Byte = Annotated[int, Field(ge=0, le=255)]


def _kind(data: Any) -> str:
    return "texts" if isinstance(data, list) and data and isinstance(data[0], str) else "bytes"


def flat(data: Any) -> Any:
    """The elements of a tensor, which JSON may have in lists of lists. Raises ValueError."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            raise ValueError("rows and elements are mixed; send all rows, or all elements")
        data = list(chain.from_iterable(data))
    return data


Data = Annotated[
    Annotated[Numbers[Byte], Tag("bytes")] | Annotated[Items[str], Tag("texts")],
    Discriminator(_kind),
    BeforeValidator(flat),
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
PROTOCOLS = InferenceParameters.model_fields.keys() - GenerateParametersBody.model_fields.keys()


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


def is_json(headers: Headers) -> bool:
    """Whether all of a body is JSON, and says so. Triton's client says what it sends in
    `Inference-Header-Content-Length` alone."""
    return HEADER_LENGTH not in headers and media_type(headers) not in ("", BINARY)


class TensorRoute(JsonRoute):
    """A route whose body is JSON, with or without binary tensors behind it."""

    def parser(self, headers: Headers) -> Parser:
        """Puts binary tensors where those in JSON are. Raises BodyError."""
        if is_json(headers):
            return super().parser(headers)
        given = headers.get(HEADER_LENGTH)
        if given is None:
            return parsed
        if not (given.isascii() and given.isdecimal() and len(given) < 16):
            raise BodyError(
                400,
                f"`Inference-Header-Content-Length` must be a number of bytes. Given: "
                f"{short(given)}",
            )
        return partial(_parsed_with_tensors, json_length=int(given))


def written(texts: Iterable[str]) -> bytes:
    """The elements of a BYTES tensor in binary form."""
    elements = (text.encode() for text in texts)
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)


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
