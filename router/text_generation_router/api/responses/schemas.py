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

from text_generation_router.api.fields import (
    DETERMINISTIC,
    IGNORED,
    STREAM,
    TEMPERATURE,
    TOP_P,
    Hint,
    ServiceTier,
)
from text_generation_router.api.responses.tools import OtherType, Tool, ToolChoice
from text_generation_router.fields import (
    MOST_TOP_LOGPROBS,
    NOT_SUPPORTED,
    Body,
    CacheSalt,
    Entries,
    Float32,
    Items,
    Penalty,
    refuses,
)

_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class TextPart(Body):
    """A text."""

    type: Literal["input_text", "output_text", "text"] = Field(
        description="All three mean the same."
    )
    text: str = Field(description="The text.")


class RefusalPart(Body):
    """The text with which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str = Field(description="The text.")


class ReasoningText(Body):
    """Text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"] = Field(description="Both mean the same.")
    text: str = Field(description="The text.")


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "text" if kind in (None, "input_text", "output_text") else str(kind)


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    Discriminator(
        _part_kind,
        custom_error_type="part_type",
        custom_error_message="Parts can be of type input_text, output_text and refusal: there is "
        "no model that reads images or files",
    ),
]


class MessageItem(Body):
    """One message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who says it.")
    content: str | Items[Part] = Field(description="A text, or parts.")


class FunctionCallItem(Body):
    """A call that the assistant asked for."""

    type: Literal["function_call"]
    call_id: str = Field(description="The id of the call. Its output names it.")
    name: str = Field(description="The name of the function.")
    namespace: str | None = Field(default=None, description="The namespace that has it.")
    arguments: str = Field(description="The arguments, as JSON text.")


class CustomToolCallItem(Body):
    """A call of a custom tool that the assistant asked for."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(description="The id of the call. Its output names it.")
    name: str = Field(description="The name of the tool.")
    namespace: str | None = Field(default=None, description="The namespace that has it.")
    input: str = Field(description="The text that the tool gets.")


class CallOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"] = Field(
        description="Both mean the same."
    )
    call_id: str = Field(description="The id of the call.")
    output: str | Items[Part] = Field(description="The result: a text, or parts.")


class ReasoningItem(Body):
    """What the assistant thought before it answered."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default=[], description="A summary of the reasoning.")
    content: Items[ReasoningText] | None = Field(
        default=None, description="The reasoning. If it is given, the other two are not read."
    )
    encrypted_content: str | None = Field(
        default=None,
        description="The reasoning as an answer of this server has it. If it is given, `summary` "
        "is not read. That of another server is not read.",
    )


class OtherItem(Body):
    """An item that is not served: left out, and named in the `warning` header."""

    type: OtherType


_ITEM_KINDS = {
    "message": "message",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
}


def _item_kind(item: Any) -> str | None:
    """Messages may leave their type out. What is only stored at OpenAI can not be left out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "message"
    if not isinstance(kind, str) or kind == "item_reference":
        return None
    return _ITEM_KINDS.get(kind, "other")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="Items can be messages, calls with their outputs, and reasoning; "
        "nothing is stored here, so send the item instead of a reference",
    ),
]


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"] = Field(
        description="`text`: any text. `json_object`: any JSON object."
    )


class JsonSchemaFormat(Body):
    """Text that is JSON of this schema."""

    type: Literal["json_schema"]
    name: str = Field(description="Changes nothing.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema.")
    description: str | None = Field(default=None, description="Changes nothing.")
    strict: bool | None = Field(
        default=None, description="Changes nothing: the schema is always followed."
    )


class TextConfig(Body):
    """The form of the text."""

    format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = Field(
        default=None, description="The form that the text must have."
    )
    verbosity: Annotated[Any, Hint("medium"), IGNORED] = None


class Reasoning(Body):
    """How the model should reason."""

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


def _check_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    if metadata is not None and len(metadata) > 16:
        raise ValueError("must have at most 16 keys")
    return metadata


def _check_include(include: list[str] | None) -> list[str] | None:
    for name in include or ():
        if name not in (_ENCRYPTED_REASONING, _LOGPROBS):
            raise ValueError(f"can only name {_LOGPROBS} and {_ENCRYPTED_REASONING}")
    return include


def _refuse_memory(value: Any) -> None:
    if value is not None:
        raise ValueError(
            "is not supported, since nothing is stored here; send the whole conversation in `input`"
        )


_Memory = Annotated[Any, AfterValidator(_refuse_memory), NOT_SUPPORTED]


class ResponsesRequest(Body):
    """Body of POST /v1/responses. Nothing is stored, so each request brings the whole conversation.

    Fields that only concern OpenAI's own service (`user`, `prompt_cache_key`, …)
    are not read.
    """

    model: str | None = Field(
        default=None, description="The served model, or `tgi`.", examples=["tgi"]
    )
    input: Annotated[str | Items[InputItem], AfterValidator(_check_input)] = Field(
        description="A prompt, or the items of a conversation.", examples=["What is deep learning?"]
    )
    instructions: str | None = Field(default=None, description="The system prompt.")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = Field(
        default=None,
        description="The most tokens to generate. Default: as many as fit after the prompt.",
    )
    temperature: Annotated[Float32, Field(ge=0)] | None = Field(
        default=None, description=TEMPERATURE
    )
    top_p: Annotated[Float32, Field(ge=0, le=1)] | None = Field(default=None, description=TOP_P)
    frequency_penalty: Penalty | None = Field(
        default=None, description="Makes a token less likely the more often it was generated."
    )
    presence_penalty: Penalty | None = Field(
        default=None, description="Makes each token that was generated less likely."
    )
    deterministic: bool | None = Field(default=None, description=DETERMINISTIC)
    cache_salt: CacheSalt | None = None
    stream: bool | None = Field(default=None, description=STREAM)
    text: TextConfig | None = Field(default=None, description="The form of the text.")
    tools: Items[Tool] | None = Field(
        default=None,
        description="The tools that the model may call. Types that are not served are left out, "
        "and named in the `warning` header.",
    )
    tool_choice: ToolChoice | None = Field(
        default=None,
        description="`auto`, `none`, `required`, the tool that must be called, or the only ones "
        "that may be.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether one answer may have several calls. Default: true."
    )
    metadata: Annotated[Entries[str] | None, AfterValidator(_check_metadata)] = Field(
        default=None, description="At most 16 names and values. The answer has the same."
    )
    include: Annotated[Items[str] | None, AfterValidator(_check_include)] = Field(
        default=None,
        description="`message.output_text.logprobs`: return log-probabilities. "
        "`reasoning.encrypted_content`: return reasoning in `encrypted_content`, too. It is not "
        "encrypted.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = Field(
        default=None, description=f"Needs {_LOGPROBS} in `include`."
    )
    reasoning: Reasoning | None = Field(
        default=None, description="How the model should reason. It changes nothing."
    )
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


class ResponseUsage(BaseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: dict[str, int] = Field(description="How many of them were in the cache.")
    output_tokens: int = Field(description="Tokens that were generated.")
    output_tokens_details: dict[str, int] = Field(description="How many of them were reasoning.")
    total_tokens: int = Field(description="Both together.")


class ResponseBody(BaseModel):
    """The answer: messages, reasoning and calls, and the request's fields."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="When the request came, in seconds since 1970.")
    completed_at: int | None = Field(
        description="When it was complete, in seconds since 1970. null: it is not."
    )
    status: Literal["in_progress", "completed", "incomplete", "failed"] = Field(
        description="`incomplete`: `incomplete_details` says why."
    )
    background: Literal[False] = Field(description="Always false.")
    error: dict[str, Any] | None = Field(description="What went wrong, if the status is `failed`.")
    frequency_penalty: float = Field(description="As in the request.")
    incomplete_details: dict[str, Any] | None = Field(
        description="Why the answer is incomplete.", examples=[{"reason": "max_output_tokens"}]
    )
    instructions: str | None = Field(description="As in the request.")
    max_output_tokens: int | None = Field(description="As in the request.")
    max_tool_calls: None = Field(description="Always null.")
    metadata: dict[str, str] = Field(description="As in the request.")
    model: str
    output: list[dict[str, Any]] = Field(description="The items.")
    parallel_tool_calls: bool = Field(description="As in the request.")
    presence_penalty: float = Field(description="As in the request.")
    previous_response_id: None = Field(description="Always null.")
    prompt_cache_key: None = Field(description="Always null.")
    reasoning: dict[str, Any] = Field(description="As in the request.")
    safety_identifier: None = Field(description="Always null.")
    service_tier: Literal["default", "priority", "flex"] = Field(
        description="The tier in which it is served."
    )
    store: Literal[False] = Field(description="Always false: nothing is stored.")
    temperature: float = Field(description="As in the request.")
    text: dict[str, Any] = Field(description="As in the request.")
    tool_choice: str | dict[str, Any] = Field(description="As in the request.")
    tools: list[dict[str, Any]] = Field(description="As in the request.")
    top_logprobs: int = Field(description="As in the request.")
    top_p: float = Field(description="As in the request.")
    truncation: Literal["disabled"] = Field(description="Always disabled.")
    usage: ResponseUsage | None = Field(description="How many tokens it took.")
