"""Anthropic's Messages bodies, and the conversations that they carry on. Described here is only
what is this server's own. What is not served is refused by name, never ignored."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from text_generation_router.api.body import DETERMINISTIC, IGNORED, Hint, schema_grammar
from text_generation_router.api.errors import BLOCK_TYPE
from text_generation_router.chat.conversation import Conversation, joined, tool_call, with_names
from text_generation_router.chat.format import ToolSpec
from text_generation_router.fields import (
    NOT_SUPPORTED,
    Body,
    Bounded,
    CacheSalt,
    Float32,
    Items,
    Refused,
    ToolName,
    drawing,
    optional,
    refuses,
)
from text_generation_router.validation import GenerateParameters

Json = dict[str, Any]
# Anthropic documents no limit; each stop sequence costs time at every token.
_MOST_STOPS = 128
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


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

    def to_message(self) -> Json:
        """The message. Templates have no place for `is_error`, so the text says it."""
        text = text_of(self.content)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


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

    def to_messages(self) -> Iterator[Json]:
        """The messages, of which each tool's result is one of its own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        yield from (b.to_message() for b in self.content if isinstance(b, ToolResultBlock))
        apart = (ToolResultBlock, RedactedThinkingBlock)
        others = [block for block in self.content if not isinstance(block, apart)]
        if others or not self.content:
            yield _message(self.role, others)


def _message(role: str, blocks: Sequence[ContentBlock]) -> Json:
    said = [block for block in blocks if isinstance(block, TextBlock | DocumentBlock)]
    message: Json = {"role": role, "content": text_of(said)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    if uses := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = [tool_call(use.id, use.name, use.input) for use in uses]
    return message


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

    def to_conversation(self) -> Conversation:
        """The conversation that the request carries on."""
        choice = self.tool_choice or ToolChoice(type="auto")
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        return Conversation(
            messages=tuple(self._messages()),
            tools=tuple(
                ToolSpec(tool.name, tool.description, tool.input_schema, tool.strict)
                for tool in self.tools
            ),
            tool_choice=choice.name
            if isinstance(choice, ForcedToolChoice)
            else _CHOICES[choice.type],
            may_be_rewritten=True,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            template_kwargs={} if thinks is None else {"enable_thinking": thinks},
            parameters=self.to_parameters(),
        )

    def to_parameters(self) -> GenerateParameters:
        """How to generate; where tokens are only counted, nothing is."""
        return GenerateParameters(inputs="")

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        """Turns of the user's that follow each other are one, as templates want it."""
        if self.system is not None:
            yield {"role": "system", "content": text_of(self.system)}
        made = with_names(message for param in self.messages for message in param.to_messages())
        if not made:  # nothing but redacted thoughts
            made = (_message(self.messages[-1].role, []),)
        yield from joined(made, "user")


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

    def to_parameters(self) -> GenerateParameters:
        """How to generate; the form of the text comes from either place."""
        newer = None if self.output_config is None else self.output_config.format
        form = newer or self.output_format
        return GenerateParameters(
            inputs="",
            sampling=drawing(self),
            max_new_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
            most_stop_sequences=_MOST_STOPS,
            grammar=None if form is None else schema_grammar(form.schema_),
            deterministic=bool(self.deterministic),
            cache_salt=self.cache_salt,
        )
