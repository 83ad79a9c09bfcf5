"""OpenAI's Responses bodies. What is not served is refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from text_generation_router.api.bounded import Entries, Items
from text_generation_router.api.openai.hints import IGNORED, Hint
from text_generation_router.api.openai.schemas import (
    MOST_TOP_LOGPROBS,
    NOT_SUPPORTED,
    Penalty,
    refuses,
)
from text_generation_router.api.schemas import Body, CacheSalt, Float32

_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class TextPart(Body):
    """Text that somebody wrote."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    """The words with which the assistant refused."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(Body):
    """Text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "refusal" if kind == "refusal" else "text"


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    Discriminator(_part_kind),
]


class MessageItem(Body):
    """One message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]


class FunctionCallItem(Body):
    """A call that the assistant asked for; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[Part]


class ReasoningItem(Body):
    """What the assistant thought before it answered."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default=[])
    content: Items[ReasoningText] | None = None


def _item_kind(item: Any) -> str | None:
    """Messages may leave their type out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="Items can be of type message, function_call, function_call_output "
        "and reasoning",
    ),
]


def _is_no_choice(name: str) -> str:
    if name in ("auto", "none", "required"):
        raise ValueError(f"a function can not be called {name!r}")
    return name


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1), AfterValidator(_is_no_choice)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The one function that has to be called."""

    type: Literal["function"]
    name: str


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(Body):
    """Text that is JSON of this schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """How the text has to look."""

    format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Hint("medium"), IGNORED] = None


class Reasoning(Body):
    """How the model should think: as it does."""

    effort: Annotated[Any, Hint(), IGNORED] = None
    summary: Annotated[Any, Hint("auto"), IGNORED] = None


def _check_input(given: str | list[InputItem]) -> str | list[InputItem]:
    if not isinstance(given, str) and all(isinstance(item, ReasoningItem) for item in given):
        raise ValueError("must be a text or have at least one item besides reasoning")
    return given


def _check_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    if metadata is not None and len(metadata) > 16:
        raise ValueError("must have at most 16 keys")
    return metadata


def _check_include(include: list[str] | None) -> list[str] | None:
    for name in include or ():
        if name not in (_ENCRYPTED_REASONING, _LOGPROBS):
            raise ValueError(
                f"can only name {_LOGPROBS} and {_ENCRYPTED_REASONING}, which changes nothing: "
                "reasoning is always given in full, as plain text"
            )
    return include


def _refuse_memory(value: Any) -> None:
    if value is not None:
        raise ValueError(
            "is not supported, since nothing is stored here; send the whole conversation in `input`"
        )


_Memory = Annotated[Any, AfterValidator(_refuse_memory), NOT_SUPPORTED]


class ResponsesRequest(Body):
    """Body of POST /v1/responses. Nothing is stored, so each request brings the whole conversation.

    Fields that only steer OpenAI's own machinery (`user`, `prompt_cache_key`, …)
    are not read.
    """

    model: str | None = Field(
        default=None, description="The served model, or `tgi`.", examples=["tgi"]
    )
    input: Annotated[str | Items[InputItem], AfterValidator(_check_input)] = Field(
        examples=["What is deep learning?"]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = Field(
        default=None, description="Default: as many as fit after the prompt."
    )
    temperature: Annotated[Float32, Field(ge=0)] | None = Field(
        default=None, description="0: always the likeliest token. Default: 1."
    )
    top_p: Annotated[Float32, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    deterministic: bool | None = Field(
        default=None, description="The same tokens in whatever company, bit for bit."
    )
    cache_salt: CacheSalt | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="Default: true.")
    metadata: Annotated[Entries[str] | None, AfterValidator(_check_metadata)] = None
    include: Annotated[Items[str] | None, AfterValidator(_check_include)] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = Field(
        default=None, description=f"Needs {_LOGPROBS} in `include`."
    )
    reasoning: Reasoning | None = None
    service_tier: Annotated[Any, Hint("auto", "default"), IGNORED] = None
    store: Annotated[Any, Hint(False), IGNORED] = None
    background: Annotated[Any, refuses(False), NOT_SUPPORTED] = None
    truncation: Annotated[Any, Hint("disabled"), IGNORED] = None
    previous_response_id: _Memory = None
    conversation: _Memory = None
    prompt: _Memory = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and _LOGPROBS not in (info.data.get("include") or ()):
            raise ValueError(f"needs {_LOGPROBS} in `include`")
        return top_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's tokens are told with their log-probabilities."""
        return _LOGPROBS in (self.include or ())


class ResponseUsage(BaseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(BaseModel):
    """The answer: items of type message, reasoning and function_call, and the request's fields."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    frequency_penalty: float
    incomplete_details: dict[str, Any] | None = Field(examples=[{"reason": "max_output_tokens"}])
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: None
    prompt_cache_key: None
    reasoning: dict[str, Any]
    safety_identifier: None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
