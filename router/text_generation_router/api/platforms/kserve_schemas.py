"""Bodies of the Open Inference Protocol, and of TGI's form of it. Described here is only
what is this server's own."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

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
