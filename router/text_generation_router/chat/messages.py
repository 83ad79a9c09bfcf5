"""The messages and tools of a chat in OpenAI's form, and their conversion for chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AliasChoices, Field, model_validator

from text_generation_router.chat.conversation import tool_call, with_names
from text_generation_router.chat.format import ToolSpec
from text_generation_router.fields import Body, Items, Refused, optional

_CHOICES = ("auto", "none", "required")
# The roles that are renamed for chat templates; all others stay as they are.
_ROLES = {"developer": "system", "function": "tool"}
# Calls of the old form have no id; Mistral's templates require nine letters and digits.
_OLD_CALL_ID = "function0"


class ContentPart(Body):
    """A part of a message: text, or a refusal of the assistant."""

    type: str = Field(description="`text` or `refusal`.", examples=["text"])
    text: str | None = optional("For the type `text`.")
    refusal: str | None = optional("For the type `refusal`: the assistant's refusal.")

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
        """The arguments as an object, or as the original text if it is not a JSON object."""
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
        description="The author: system, developer, user, assistant, tool or function. The chat "
        "template gets any other role unchanged.",
        examples=["user"],
    )
    content: str | Items[ContentPart] | None = optional(
        "A text, or parts.", examples=["What is Deep Learning?"]
    )
    name: str | None = optional("The name of the author, if the chat template uses it.")
    tool_calls: Items[ToolCallBody] | None = optional("The calls that the assistant made.")
    tool_call_id: str | None = optional("The id of the call that this message is the result of.")
    refusal: str | None = optional("The assistant's refusal, instead of `content`.")
    reasoning_content: str | None = optional(
        "The assistant's reasoning. The chat template decides if the model sees it."
    )
    reasoning: str | None = optional("The same as `reasoning_content`, which wins.")
    audio: Refused = None
    function_call: CalledFunction | None = optional(
        "The old form of `tool_calls`. A message of the role function answers it."
    )

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        has_call = bool(self.tool_calls) or self.function_call is not None
        if self.content is None and self.refusal is None and not has_call:
            raise ValueError(
                "`content` must be a string or a list of parts; only a message with `tool_calls` "
                "may omit it"
            )
        return self

    def to_message(self) -> dict[str, Any]:
        """The message as in `Conversation.messages`."""
        content = self.content if self.content is not None else self.refusal or ""
        if not isinstance(content, str):
            content = "".join(part.content for part in content)
        message: dict[str, Any] = {
            "role": _ROLES.get(self.role, self.role),
            "content": content,
        }
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        more = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thought,
        }
        message |= {name: value for name, value in more.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(call.id, call.function.name, call.function.parsed_arguments)
                for call in self.tool_calls
            ]
        if self.function_call is not None:
            called = self.function_call
            call = tool_call(_OLD_CALL_ID, called.name, called.parsed_arguments)
            message.setdefault("tool_calls", []).append(call)
        if self.role == "function":
            message.setdefault("tool_call_id", _OLD_CALL_ID)
        return message


class FunctionBody(Body):
    """A function the model may call."""

    name: str = Field(
        min_length=1, description="The name of the function.", examples=["get_weather"]
    )
    description: str | None = optional("What the function does, for the model.")
    parameters: dict[str, Any] | None = optional(
        "JSON schema of the arguments. Default: no arguments. `arguments` is the same.",
        validation_alias=AliasChoices("parameters", "arguments"),
    )
    strict: bool | None = optional(
        "Refuse the request if a part of the schema can not be enforced."
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
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction = Field(description="The function that must be called.")


class AllowedTool(Body):
    """One of the functions that may be called."""

    type: Literal["function"] = "function"
    function: NamedFunction = Field(description="The function that may be called.")


class AllowedTools(Body):
    """The only functions that may be called, and whether one must be called."""

    mode: Literal["auto", "required"] = Field(description="required: one must be called.")
    tools: Annotated[Items[AllowedTool], Field(min_length=1)] = Field(
        description="The functions that may be called."
    )


class AllowedToolChoice(Body):
    """The prompt describes all tools, but the model may only call some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools = Field(description="The allowed functions.")


ToolChoice = str | NamedToolChoice | AllowedToolChoice


def tool_choice_of(choice: ToolChoice | None) -> str:
    """As in `Conversation.tool_choice`; any other word is a function's name, as in TGI."""
    match choice:
        case None:
            return "auto"
        case str():
            return choice
        case AllowedToolChoice():
            return choice.allowed_tools.mode
        case NamedToolChoice():
            return choice.function.name


def allowed_tools_of(choice: ToolChoice | None) -> tuple[str, ...] | None:
    """The names as in `Conversation.allowed_tools`."""
    if not isinstance(choice, AllowedToolChoice):
        return None
    return tuple(tool.function.name for tool in choice.allowed_tools.tools)


def to_messages(bodies: Sequence[MessageBody]) -> tuple[dict[str, Any], ...]:
    """All messages; a tool's result without a name gets the name of the called function."""
    return with_names(body.to_message() for body in bodies)
