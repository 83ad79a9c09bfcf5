"""Anthropic's Messages bodies. What is not served is refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag

from text_generation_router.api.bounded import IN_SLICES, Items
from text_generation_router.api.openai.hints import IGNORED, Hint
from text_generation_router.api.openai.schemas import NOT_SUPPORTED, Refused, refuses
from text_generation_router.api.schemas import Body, CacheSalt, Float32


class TextBlock(Body):
    """Text that somebody wrote."""

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


class ToolResultBlock(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] = ""
    is_error: bool = False


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return None if kind is None else str(kind)


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _kind,
        custom_error_type="block_type",
        custom_error_message="Blocks can be of type text, thinking, redacted_thinking, tool_use "
        "and tool_result; this model reads text only",
    ),
]


class MessageParam(Body):
    """One message of the conversation; a last one of the assistant's is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]


def _is_no_choice(name: str) -> str:
    if name in ("auto", "none", "required"):
        raise ValueError(f"a tool can not be called {name!r}")
    return name


class Tool(Body):
    """A function that the model may call; `input_schema` is the JSON schema of its input."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1), AfterValidator(_is_no_choice)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class ToolChoice(Body):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    """The tool that has to be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks first; its chat template is told as `enable_thinking`."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Annotated[Any, Hint(), IGNORED] = None


class JsonOutputFormat(Body):
    """Text that is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the text has to look."""

    format: JsonOutputFormat | None = None
    effort: Annotated[Any, Hint(), IGNORED] = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens.

    `cache_control` and fields that only steer Anthropic's own machinery (`metadata`,
    `service_tier`, …) are not read.
    """

    model: str = Field(description="The served model, or `tgi`.", examples=["tgi"])
    messages: Annotated[Annotated[list[MessageParam], Field(min_length=1)], IN_SLICES] = Field(
        examples=[[{"role": "user", "content": "What is deep learning?"}]]
    )
    system: str | Items[TextBlock] | None = None
    tools: Items[Tool] = Field(default=[])
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[Any, refuses([]), NOT_SUPPORTED] = None
    container: Refused = None


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**32)]
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] = Field(default=[])
    stream: bool = False
    temperature: Annotated[Float32, Field(ge=0)] | None = Field(
        default=None, description="0: always the likeliest token. Default: 1."
    )
    top_p: Annotated[Float32, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    deterministic: bool | None = Field(
        default=None, description="The same tokens in whatever company, bit for bit."
    )
    cache_salt: CacheSalt | None = None


class UsageBody(BaseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(BaseModel):
    """The answer: blocks of type text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: UsageBody


class TokenCountBody(BaseModel):
    """Tokens of the prompt."""

    input_tokens: int


class MessageErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """Body of every error, and of the event that ends a stream."""

    type: Literal["error"]
    error: MessageErrorDetail
