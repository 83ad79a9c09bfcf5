"""The messages and tools of a chat as OpenAI writes them, and as chat templates want them."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import orjson
from pydantic import AliasChoices, Field, model_validator

from text_generation_router.api.bounded import Items
from text_generation_router.api.openai.schemas import Refused
from text_generation_router.api.schemas import Body
from text_generation_router.chat.format import ToolSpec

_CHOICES = ("auto", "none", "required")


class ContentPart(Body):
    """A part of a message: a text, or what the assistant said instead of an answer."""

    type: str = Field(description="`text` or `refusal`.", examples=["text"])
    text: str | None = Field(default=None, description="For the type `text`.")
    refusal: str | None = Field(
        default=None,
        description="For the type `refusal`: what the assistant said instead of an answer.",
    )

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type not in ("text", "refusal"):
            raise ValueError(
                f"a part of type {self.type[:64]!r} is not supported, this model reads text only; "
                'send {"type": "text", "text": "…"}'
            )
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type!r} needs a string `{self.type}`")
        return self

    @property
    def content(self) -> str:
        """The text of the part."""
        return str(getattr(self, self.type))


class CalledFunction(Body):
    """A function with its arguments, as JSON text or as the JSON itself."""

    name: str = Field(description="The name of the function.")
    arguments: Any = Field(
        validation_alias=AliasChoices("arguments", "parameters"),
        description="JSON, or JSON written as text. `parameters` is the same.",
    )

    @property
    def parsed_arguments(self) -> Any:
        """The object of the arguments, or the text as it came if that is none."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            parsed = orjson.loads(self.arguments or "{}")
        except orjson.JSONDecodeError:
            return self.arguments
        return parsed if isinstance(parsed, dict) else self.arguments


class ToolCallBody(Body):
    """A call that the assistant made."""

    id: str = Field(description="The id of the call. The tool's result names it.")
    type: Literal["function"] = "function"
    function: CalledFunction = Field(description="The function that was called.")


class MessageBody(Body):
    """One message of any role."""

    role: str = Field(
        min_length=1,
        description="Who says it: system, developer, user, assistant or tool.",
        examples=["user"],
    )
    content: str | Items[ContentPart] | None = Field(
        default=None, description="A text, or parts.", examples=["What is Deep Learning?"]
    )
    name: str | None = Field(
        default=None, description="The name of the speaker, if the chat template reads it."
    )
    tool_calls: Items[ToolCallBody] | None = Field(
        default=None, description="The calls that the assistant made."
    )
    tool_call_id: str | None = Field(
        default=None, description="The id of the call that this message is the result of."
    )
    refusal: str | None = Field(
        default=None, description="What the assistant said instead of an answer."
    )
    reasoning_content: str | None = Field(
        default=None,
        description="What the assistant thought. The chat template decides if the model sees it.",
    )
    audio: Refused = None
    function_call: Refused = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError(
                "`content` must be a string or a list of parts; only a message with `tool_calls` "
                "can do without"
            )
        return self

    def to_message(self) -> dict[str, Any]:
        """As `Conversation.messages` has it."""
        content = self.content if self.content is not None else self.refusal or ""
        if not isinstance(content, str):
            content = "".join(part.content for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.parsed_arguments,
                    },
                }
                for call in self.tool_calls
            ]
        return message


class FunctionBody(Body):
    """A function the model may call."""

    name: str = Field(
        min_length=1, description="The name of the function.", examples=["get_weather"]
    )
    description: str | None = Field(
        default=None, description="What the function does, for the model."
    )
    parameters: dict[str, Any] | None = Field(
        default=None,
        validation_alias=AliasChoices("parameters", "arguments"),
        description="JSON schema of the arguments. Default: no arguments. `arguments` is the same.",
    )
    strict: bool | None = Field(
        default=None, description="Refuse the request if a part of the schema can not be enforced."
    )


class ToolBody(Body):
    """A tool. Only functions are supported."""

    type: Literal["function"] = "function"
    function: FunctionBody = Field(description="The function.")

    @model_validator(mode="after")
    def _is_no_choice(self) -> Self:
        if self.function.name in _CHOICES:
            raise ValueError(f"a function can not be called {self.function.name!r}")
        return self

    def to_spec(self) -> ToolSpec:
        """The same without pydantic."""
        function = self.function
        return ToolSpec(
            function.name, function.description, function.parameters, bool(function.strict)
        )


class NamedFunction(Body):
    """The name of a function."""

    name: str = Field(min_length=1, description="The name of the function.")


class NamedToolChoice(Body):
    """The function that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction = Field(description="The function that must be called.")


ToolChoice = str | NamedToolChoice


def tool_choice_of(choice: ToolChoice | None) -> str:
    """As `Conversation.tool_choice` has it; any other word is a function's name, as in TGI."""
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.function.name


def to_messages(bodies: Sequence[MessageBody]) -> tuple[dict[str, Any], ...]:
    """All messages; a tool's result without a name gets that of the function that was called."""
    messages = tuple(body.to_message() for body in bodies)
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    for message in messages:
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))):
            message.setdefault("name", name)
    return messages
