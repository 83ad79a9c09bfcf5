"""OpenAI's Responses bodies, and the conversations that they carry on. Described here is only what
is this server's own. What is not served is refused by name, never ignored."""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, ValidationInfo, field_validator

from text_generation_router.api.body import (
    ANY_OBJECT,
    DETERMINISTIC,
    IGNORED,
    Hint,
    ServiceTier,
    priority_of,
    schema_grammar,
)
from text_generation_router.api.responses.tools import (
    AllowedTools,
    OtherType,
    Tool,
    ToolChoice,
    by_type,
    choice_of,
    flat_name,
    served_tools,
    tools_left_out,
)
from text_generation_router.chat.conversation import Conversation, joined, tool_call, with_names
from text_generation_router.chat.messages import CalledFunction
from text_generation_router.fields import (
    MOST_TOP_LOGPROBS,
    NOT_SUPPORTED,
    Body,
    Bounded,
    CacheSalt,
    Float32,
    Items,
    Penalty,
    drawing,
    optional,
    refuses,
)
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters

Message = dict[str, Any]

_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
# Of `encrypted_content`.
_PREFIX = "plain1."


class TextPart(Body):
    """A text; all types mean the same."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    """The text with which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The same."""
        return self.refusal


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


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Body):
    """One message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]

    def to_message(self) -> Message:
        """The message."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _text(self.content)}


class FunctionCallItem(Body):
    """A call that the assistant asked for."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def to_message(self) -> Message:
        """A part of a message of the assistant's."""
        called = CalledFunction(name=self.name, arguments=self.arguments)
        return _call(self, called.parsed_arguments)


class CustomToolCallItem(Body):
    """A call of a custom tool that the assistant asked for."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def to_message(self) -> Message:
        """A part of a message of the assistant's."""
        return _call(self, {"input": self.input})


def _call(item: FunctionCallItem | CustomToolCallItem, arguments: Any) -> Message:
    call = tool_call(item.call_id, flat_name(item.namespace, item.name), arguments)
    return {"role": "assistant", "tool_calls": [call]}


class CallOutputItem(Body):
    """The result of a call; both types mean the same."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Items[Part]

    def to_message(self) -> Message:
        """The message."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


class ReasoningItem(Body):
    """What the assistant thought before it answered: `content`, or else `encrypted_content` as an
    answer of this server has it, or else `summary`."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default=[])
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None

    def to_message(self) -> Message:
        """A part of a message of the assistant's."""
        return {"role": "assistant", "reasoning_content": self._text()}

    def _text(self) -> str:
        written = self.encrypted_content or ""
        if not self.content and written.startswith(_PREFIX):
            with suppress(ValueError):  # another server wrote it
                return b64decode(written.removeprefix(_PREFIX), validate=True).decode()
        return "".join(part.text for part in self.content or self.summary)


def write_encrypted(text: str) -> str:
    """The field for a reasoning of this text: in base64, and not encrypted.

    Nothing is stored here, and clients with `store: false` keep this field only. There is no secret
    in it: the client has the same text in `content`.
    """
    return _PREFIX + b64encode(text.encode()).decode()


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


_Said = MessageItem | FunctionCallItem | CustomToolCallItem | CallOutputItem | ReasoningItem


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]

    def to_grammar(self) -> Grammar | None:
        """The form of the text; None: any."""
        return schema_grammar(ANY_OBJECT) if self.type == "json_object" else None


class JsonSchemaFormat(Body):
    """Text that is JSON of this schema, which is always followed: `strict` changes nothing."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None

    def to_grammar(self) -> Grammar:
        """The form of the text."""
        return schema_grammar(self.schema_)


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

    def to_conversation(self) -> Conversation:
        """The conversation that the request carries on. Raises ToolError."""
        specs = tuple(tool.spec for tool in served_tools(self.tools or ()))
        choice, allowed = choice_of(self.tool_choice, self.tools, has_tools=bool(specs))
        form = None if self.text is None else self.text.format
        return Conversation(
            messages=tuple(self._messages()),
            tools=specs,
            tool_choice=choice,
            allowed_tools=allowed,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            may_be_rewritten=True,
            # As at OpenAI: an answer is always a new turn.
            add_generation_prompt=True,
            parameters=GenerateParameters(
                inputs="",
                sampling=drawing(self),
                max_new_tokens=self.max_output_tokens,
                top_n_tokens=self.top_logprobs if self.wants_logprobs else None,
                most_top_n_tokens=MOST_TOP_LOGPROBS,
                grammar=None if form is None else form.to_grammar(),
                deterministic=bool(self.deterministic),
                cache_salt=self.cache_salt,
                priority=priority_of(self.service_tier),
            ),
        )

    def left_out(self) -> Iterator[str]:
        """What of the request is left out, for the `warning` header."""
        yield from tools_left_out(self.tools or ())
        if isinstance(self.tool_choice, AllowedTools):
            yield from tools_left_out(self.tool_choice.tools)
        if not isinstance(self.input, str):
            for item in self.input:
                if isinstance(item, OtherItem):
                    yield f"items of type {item.type}"

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        """Everything said, as templates want it: with one system message at most in front, and
        turns of the user's that follow each other as one."""
        items: Sequence[_Said] = (
            [MessageItem(role="user", content=self.input)]
            if isinstance(self.input, str)
            else [item for item in self.input if not isinstance(item, OtherItem)]
        )
        instructions = [] if self.instructions is None else [self.instructions]
        said = 0
        for item in items:
            if not isinstance(item, MessageItem) or item.role not in ("system", "developer"):
                break
            instructions.append(_text(item.content))
            said += 1
        if instructions:
            yield {"role": "system", "content": "\n\n".join(instructions)}
        yield from joined(with_names(_turns(items[said:])), "user")


def _turns(items: Sequence[_Said]) -> Iterator[Message]:
    """The items as messages. Reasoning, a text and calls that follow each other are one message of
    the assistant's, in which reasoning comes first; reasoning alone is none."""
    made: list[Message] = []
    for message in (item.to_message() for item in items):
        last = made[-1] if made and message["role"] == made[-1]["role"] == "assistant" else None
        if last is not None and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif last is not None and "content" in message and "content" not in last:
            last["content"] = message["content"]
        else:
            made.append(message)
    for message in made:
        if message.keys() - {"role", "reasoning_content"}:
            yield {"role": message["role"], "content": "", **message}
