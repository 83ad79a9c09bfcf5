"""Bodies of the Open Inference Protocol, and of TGI's form of it."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from text_generation_router.api.bounded import Items, Numbers
from text_generation_router.api.kserve_tensors import flat
from text_generation_router.api.openai.hints import IGNORED, Hint
from text_generation_router.api.openai.schemas import Refused
from text_generation_router.api.schemas import Body, GenerateParametersBody, Uint64

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
PROTOCOLS = InferenceParameters.model_fields.keys() - GenerateParametersBody.model_fields.keys()


class InferenceRequest(Body):
    """Body of an inference; the parameters are those of /generate, and the same for all inputs."""

    id: str | None = None
    inputs: Items[InputTensor]
    outputs: Items[OutputName] | None = Field(
        default=None, description=f"As many as there are inputs. Default: `{OUTPUT}`."
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
