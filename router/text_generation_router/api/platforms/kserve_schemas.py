"""Bodies of the Open Inference Protocol, and of TGI's form of it."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from text_generation_router.api.fields import IGNORED, Hint
from text_generation_router.api.platforms.kserve_tensors import flat
from text_generation_router.api.tgi.schemas import GenerateParametersBody
from text_generation_router.fields import Body, Items, Numbers, Refused, Uint64

INPUT, OUTPUT = "text_input", "text_output"
"""What tensors are called that have no name of their own."""

Byte = Annotated[int, Field(ge=0, le=255)]


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

    name: str = Field(description="Any name.", examples=["text_input"])
    shape: Numbers[Uint64] = Field(
        description="The number of elements, in up to 8 dimensions.", examples=[[1]]
    )
    datatype: str = Field(description="BYTES or UINT8.", examples=["BYTES"])
    parameters: TensorParameters | None = Field(
        default=None, description="Where the data is, if not in `data`."
    )
    data: Data = Field(description="Texts, or the bytes of one in UTF-8.", examples=[["Hello"]])

    @property
    def has_bytes(self) -> bool:
        """Whether the data is the bytes of one text."""
        return _kind(self.data) == "bytes"


class OutputParameters(Body):
    """How an output is to be sent."""

    binary_data: bool | None = Field(
        default=None,
        description="Send it behind the JSON of the answer. Default: `binary_data_output`.",
    )
    classification: Refused = None
    shared_memory_region: Refused = None


class OutputName(Body):
    """What the answer to the input at the same place is to be called."""

    name: str = Field(description="The name.")
    parameters: OutputParameters | None = Field(default=None, description="How it is to be sent.")


class InferenceParameters(GenerateParametersBody):
    """The parameters of /generate, and the protocol's own."""

    binary_data_output: bool | None = Field(
        default=None, description="Send outputs behind the JSON of the answer."
    )
    priority: Annotated[Any, Hint(0), IGNORED] = None
    timeout: Annotated[Any, Hint(), IGNORED] = None
    sequence_id: Refused = None


# With nothing but these the parameters count as left out.
PROTOCOLS = InferenceParameters.model_fields.keys() - GenerateParametersBody.model_fields.keys()


class InferenceRequest(Body):
    """Body of an inference; the parameters are those of /generate, and the same for all inputs."""

    id: str | None = Field(default=None, description="Any id. The answer has the same.")
    inputs: Items[InputTensor] = Field(description="The prompts.")
    outputs: Items[OutputName] | None = Field(
        default=None,
        description=f"A name for each answer, as many as there are inputs. Default: `{OUTPUT}`.",
    )
    parameters: InferenceParameters = Field(
        default_factory=lambda: InferenceParameters(do_sample=True),
        description="How to generate. `details` and `decoder_input_details` are refused.",
    )


class OutputTensor(BaseModel):
    """Generated texts."""

    name: str = Field(description="The name that the request gave.")
    shape: list[int] = Field(
        description="That of the input. In TGI's form 1, and the number of bytes.", examples=[[1]]
    )
    datatype: str = Field(description="Always BYTES.", examples=["BYTES"])
    parameters: dict[str, int] | None = Field(
        default=None, description="`binary_data_size`, where the data is behind the JSON."
    )
    data: list[str] | list[int] = Field(
        default=[],
        description="The texts; left out where they are behind the JSON. In TGI's form one text, "
        "as bytes of UTF-8.",
    )


class InferenceResponse(BaseModel):
    """The generated texts in the order of the inputs."""

    id: str | None = Field(default=None, description="As in the request.")
    model_name: str | None = Field(
        default=None, description="The name in the path. Not in TGI's form."
    )
    model_version: str | None = Field(
        default=None, description="The version in the path, or 1. Not in TGI's form."
    )
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


class TensorMetadata(BaseModel):
    """A tensor that the model takes or gives; -1: any size."""

    name: str = Field(description="Its name, unless a request gives another.")
    datatype: str = Field(description="Always BYTES.")
    shape: list[int] = Field(description="Always -1: as many texts as there are.")


class MetadataModelResponse(BaseModel):
    """What the model takes and gives."""

    name: str = Field(description="The model of the path.")
    versions: list[str] = Field(description="Always 1. Requests may name any.")
    platform: str = Field(description="The server.")
    inputs: list[TensorMetadata] = Field(description="The prompts.")
    outputs: list[TensorMetadata] = Field(description="The generated texts.")
