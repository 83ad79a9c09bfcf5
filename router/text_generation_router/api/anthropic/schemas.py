"""Anthropic's Messages bodies. What is not served is refused by name, never ignored."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
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
)
from text_generation_router.fields import (
    NOT_SUPPORTED,
    Body,
    Bounded,
    CacheSalt,
    Float32,
    Items,
    Refused,
    ToolName,
    refuses,
)


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str = Field(description="The text.")


class ThinkingBlock(Body):
    """What the assistant thought before it answered."""

    type: Literal["thinking"]
    thinking: str = Field(description="The text.")


class RedactedThinkingBlock(Body):
    """Thoughts that only Anthropic can read: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str = Field(default="", description="Not read.")


class ToolUseBlock(Body):
    """A call that the assistant asked for."""

    type: Literal["tool_use"]
    id: str = Field(description="The id of the call. The result names it.")
    name: str = Field(description="The name of the tool.")
    input: dict[str, Any] = Field(description="The input of the tool.")


class PlainSource(Body):
    """A document that is a text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = Field(description="The text.")


class ContentSource(Body):
    """A document in parts."""

    type: Literal["content"]
    content: str | Items[TextBlock] = Field(description="A text, or several.")

    @property
    def data(self) -> str:
        """All texts."""
        return text_of(self.content)


class DocumentBlock(Body):
    """A document. Its title, its context and its text are read in this order."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")] = Field(
        description="The text."
    )
    title: str | None = Field(default=None, description="Stands before the text.")
    context: str | None = Field(default=None, description="Stands before the text, too.")
    citations: Annotated[Any, refuses({"enabled": False}), NOT_SUPPORTED] = None

    @property
    def text(self) -> str:
        """The lines that the model reads: on lines of their own, whatever stands beside them."""
        parts = (self.title, self.context, self.source.data)
        return "\n".join(["", *filter(None, parts), ""])


def text_of(content: str | Sequence[TextBlock | DocumentBlock]) -> str:
    """A text, or the texts of blocks as one."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _kind(block: Any) -> str | None:
    """The type of a block that can be read; None: it is an image, a PDF, or unknown."""
    if not isinstance(block, dict):
        return getattr(block, "type", None)
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") not in ("text", "content"):
        return None
    kind = block.get("type")
    return kind if isinstance(kind, str) else None


BLOCK_TYPE = "block_type"
"""The type of the error for a block that can not be read."""

_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[DocumentBlock, Tag("document")],
    Discriminator(
        _kind,
        custom_error_type=BLOCK_TYPE,
        custom_error_message="blocks of a result can be of type text and document",
    ),
]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(description="The id of the call.")
    content: str | Items[_ResultBlock] = Field(default="", description="The result.")
    is_error: bool = Field(default=False, description="Whether the call failed.")


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _kind,
        custom_error_type=BLOCK_TYPE,
        custom_error_message="blocks can be of type text, document, thinking, redacted_thinking, "
        "tool_use and tool_result",
    ),
]


class MessageParam(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="Who says it.")
    content: str | Items[ContentBlock] = Field(description="A text, or blocks.")


class Tool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = Field(default=None, description="May be left out.")
    name: ToolName = Field(description="The name of the tool.")
    description: str | None = Field(default=None, description="What the tool does, for the model.")
    input_schema: dict[str, Any] = Field(description="JSON schema of the input.")
    strict: bool = Field(
        default=False, description="Refuse the request if a part of the schema can not be enforced."
    )


class ToolChoice(Body):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "none"] = Field(
        description="`auto`: the model decides. `any`: at least one tool is called. `none`: no "
        "tool is called."
    )
    disable_parallel_tool_use: bool = Field(default=False, description="At most one call.")


class ForcedToolChoice(Body):
    """The tool that has to be called."""

    type: Literal["tool"]
    name: str = Field(description="The name of the tool.")
    disable_parallel_tool_use: bool = Field(default=False, description="At most one call.")


class Thinking(Body):
    """Whether the model thinks before it answers: `enable_thinking` of the chat template."""

    type: Literal["adaptive", "enabled", "disabled"] = Field(
        description="`disabled`: the model does not think first. The other two: it does."
    )
    budget_tokens: Annotated[Any, Hint(), IGNORED] = None


class JsonOutputFormat(Body):
    """Text that is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema.")


class OutputConfig(Body):
    """The form of the text."""

    format: JsonOutputFormat | None = Field(
        default=None, description="The form that the text must have."
    )
    effort: Annotated[Any, Hint(), IGNORED] = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens.

    `cache_control` and fields that only concern Anthropic's own service (`metadata`,
    `service_tier`, …) are not read.
    """

    model: str = Field(description="The served model, or `tgi`.", examples=["tgi"])
    messages: Annotated[Annotated[list[MessageParam], Field(min_length=1)], Bounded()] = Field(
        description="The conversation so far. If the last message is the assistant's, the answer "
        "continues it.",
        examples=[[{"role": "user", "content": "What is deep learning?"}]],
    )
    system: str | Items[TextBlock] | None = Field(default=None, description="The system prompt.")
    tools: Items[Tool] = Field(default=[], description="The tools that the model may call.")
    tool_choice: Annotated[ToolChoice | ForcedToolChoice, Field(discriminator="type")] | None = (
        Field(default=None, description="Whether tools are called, and which one.")
    )
    thinking: Thinking | None = Field(
        default=None, description="Whether the model thinks before it answers."
    )
    output_config: OutputConfig | None = Field(default=None, description="The form of the text.")
    output_format: JsonOutputFormat | None = Field(
        default=None, description="The older place of `output_config.format`."
    )
    mcp_servers: Annotated[Any, refuses([]), NOT_SUPPORTED] = None
    container: Refused = None

    @field_validator("output_format")
    @classmethod
    def _one_format(
        cls, given: JsonOutputFormat | None, info: ValidationInfo
    ) -> JsonOutputFormat | None:
        config = info.data.get("output_config")
        newer = None if config is None else config.format
        if given is not None and newer is not None and given != newer:
            raise ValueError(
                "must not be given together with `output_config.format`, which differs"
            )
        return given

    @property
    def text_format(self) -> JsonOutputFormat | None:
        """The form of the text, from either place."""
        newer = None if self.output_config is None else self.output_config.format
        return newer or self.output_format


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**32)] = Field(
        description="The most tokens to generate."
    )
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="The text ends before any of these."
    )
    stream: bool = Field(default=False, description=STREAM)
    temperature: Annotated[Float32, Field(ge=0)] | None = Field(
        default=None, description=TEMPERATURE
    )
    top_p: Annotated[Float32, Field(ge=0, le=1)] | None = Field(default=None, description=TOP_P)
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="Draw only from this many of the likeliest tokens."
    )
    deterministic: bool | None = Field(default=None, description=DETERMINISTIC)
    cache_salt: CacheSalt | None = None


class UsageBody(BaseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int = Field(
        description="Tokens of the prompt that were computed for this request."
    )
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(
        description="Tokens of the prompt that were in the cache already."
    )
    output_tokens: int = Field(description="Tokens that were generated.")


class MessageBody(BaseModel):
    """The answer: blocks of type text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="The blocks.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = Field(
        description="Why the message ended."
    )
    stop_sequence: str | None = Field(description="The stop sequence that ended it, if one did.")
    usage: UsageBody = Field(description="How many tokens it took.")


class TokenCountBody(BaseModel):
    """Tokens of the prompt."""

    input_tokens: int = Field(description="How many tokens the prompt has.")


class MessageErrorDetail(BaseModel):
    """What went wrong."""

    type: str = Field(description="The kind of the error, in a word.")
    message: str = Field(description="What was wrong, in a sentence.")


class MessageErrorBody(BaseModel):
    """Body of every error, and of the event that ends a stream."""

    type: Literal["error"]
    error: MessageErrorDetail = Field(description="The error.")
    request_id: str | None = Field(description="The id of the request, as its header has it.")
