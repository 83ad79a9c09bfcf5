"""Anthropic's Messages bodies. Described here is only what is this server's own. What is not served
is refused by name, never ignored."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from text_generation_router.api.errors import BLOCK_TYPE
from text_generation_router.api.fields import DETERMINISTIC, IGNORED, Hint
from text_generation_router.fields import (
    NOT_SUPPORTED,
    Body,
    Bounded,
    CacheSalt,
    Float32,
    Items,
    Refused,
    ToolName,
    optional,
    refuses,
)


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """What the assistant thought before it answered."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Thoughts that only Anthropic can read: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Body):
    """A call that the assistant asked for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class PlainSource(Body):
    """A document that is a text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Body):
    """A document in parts."""

    type: Literal["content"]
    content: str | Items[TextBlock]

    @property
    def data(self) -> str:
        """All texts."""
        return text_of(self.content)


class DocumentBlock(Body):
    """A document. Its title, its context and its text are read in this order."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
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
    tool_use_id: str
    content: str | Items[_ResultBlock] = ""
    is_error: bool = False


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

    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]


class Tool(Body):
    """A function that the model may call. `strict`: refuse the request if a part of the schema can
    not be enforced."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class ToolChoice(Body):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class ForcedToolChoice(Body):
    """The tool that has to be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks before it answers: `enable_thinking` of the chat template."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Annotated[Any, Hint(), IGNORED] = None


class JsonOutputFormat(Body):
    """Text that is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the text."""

    format: JsonOutputFormat | None = None
    effort: Annotated[Any, Hint(), IGNORED] = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens.

    `cache_control` and fields that only concern Anthropic's own service (`metadata`,
    `service_tier`, …) are not read. If the last message is the assistant's, the answer goes on
    with it.
    """

    model: str = Field(description="The served model, or `tgi`.")
    messages: Annotated[Annotated[list[MessageParam], Field(min_length=1)], Bounded()]
    system: str | Items[TextBlock] | None = None
    tools: Items[Tool] = Field(default=[])
    tool_choice: Annotated[ToolChoice | ForcedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = optional("The older place of `output_config.format`.")
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

    max_tokens: Annotated[int, Field(ge=1, lt=2**32)]
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] = Field(default=[])
    stream: bool = False
    temperature: Annotated[Float32, Field(ge=0)] | None = None
    top_p: Annotated[Float32, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    deterministic: bool | None = optional(DETERMINISTIC)
    cache_salt: CacheSalt | None = None
