"""OpenAI's Responses bodies. Described here is only what is this server's own. What is not served
is refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from text_generation_router.api.fields import (
    DETERMINISTIC,
    IGNORED,
    Hint,
    ServiceTier,
)
from text_generation_router.api.responses.tools import OtherType, Tool, ToolChoice, by_type
from text_generation_router.fields import (
    MOST_TOP_LOGPROBS,
    NOT_SUPPORTED,
    Body,
    Bounded,
    CacheSalt,
    Float32,
    Items,
    Penalty,
    optional,
    refuses,
)

_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class TextPart(Body):
    """A text; all types mean the same."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    """The text with which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(Body):
    """Text of a reasoning item; both types mean the same."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    by_type(
        {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"},
        error="part_type",
        message="Parts can be of type input_text, output_text and refusal: there is "
        "no model that reads images or files",
        other=None,
        missing="text",
    ),
]


class MessageItem(Body):
    """One message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]


class FunctionCallItem(Body):
    """A call that the assistant asked for."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomToolCallItem(Body):
    """A call of a custom tool that the assistant asked for."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(Body):
    """The result of a call; both types mean the same."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Items[Part]


class ReasoningItem(Body):
    """What the assistant thought before it answered: `content`, or else `encrypted_content` as an
    answer of this server has it, or else `summary`."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default=[])
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None


class OtherItem(Body):
    """An item that is not served: left out, and named in the `warning` header."""

    type: OtherType


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    # Messages may leave their type out. What is only stored at OpenAI can not be left out.
    by_type(
        {
            "message": "message",
            "function_call": "function_call",
            "custom_tool_call": "custom_tool_call",
            "function_call_output": "output",
            "custom_tool_call_output": "output",
            "reasoning": "reasoning",
            "item_reference": "refused",
        },
        error="item_type",
        message="Items can be messages, calls with their outputs, and reasoning; "
        "nothing is stored here, so send the item instead of a reference",
        missing="message",
    ),
]


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(Body):
    """Text that is JSON of this schema, which is always followed: `strict` changes nothing."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """The form of the text."""

    format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Hint("medium"), IGNORED] = None


class Reasoning(Body):
    """How the model should reason; it changes nothing."""

    effort: Annotated[Any, Hint(), IGNORED] = None
    summary: Annotated[Any, Hint("auto"), IGNORED] = None


def _check_input(given: str | list[InputItem]) -> str | list[InputItem]:
    silent = (ReasoningItem, OtherItem)
    if not isinstance(given, str) and all(isinstance(item, silent) for item in given):
        raise ValueError(
            "must be a text or have at least one item besides reasoning and items that are not "
            "served here"
        )
    return given


def _check_include(include: list[str] | None) -> list[str] | None:
    for name in include or ():
        if name not in (_ENCRYPTED_REASONING, _LOGPROBS):
            raise ValueError(f"can only name {_LOGPROBS} and {_ENCRYPTED_REASONING}")
    return include


_Memory = Annotated[
    Any,
    refuses(
        sentence="is not supported, since nothing is stored here; send the whole conversation in "
        "`input`"
    ),
    NOT_SUPPORTED,
]


class ResponsesRequest(Body):
    """Body of POST /v1/responses. Nothing is stored, so each request brings the whole conversation.

    Fields that only concern OpenAI's own service (`user`, `prompt_cache_key`, …) are not read.
    Tools of types that are not served are left out, and named in the `warning` header. `include`
    can name `message.output_text.logprobs` and `reasoning.encrypted_content`, which is not
    encrypted.
    """

    model: str | None = None
    input: Annotated[str | Items[InputItem], AfterValidator(_check_input)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    temperature: Annotated[Float32, Field(ge=0)] | None = None
    top_p: Annotated[Float32, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    deterministic: bool | None = optional(DETERMINISTIC)
    cache_salt: CacheSalt | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Bounded(16)] | None = None
    include: Annotated[Items[str] | None, AfterValidator(_check_include)] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    reasoning: Reasoning | None = None
    service_tier: ServiceTier = None
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
        """Whether the answer has the log-probabilities of its tokens."""
        return _LOGPROBS in (self.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Whether reasoning items have `encrypted_content`."""
        return _ENCRYPTED_REASONING in (self.include or ())
