"""A chat request, independent of the API that received it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from text_generation_router.chat.format import ToolSpec
from text_generation_router.validation import GenerateParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages so far, and the parameters of the next one.

    `messages` have the form that Hugging Face's templates expect: `role`, `content` (always a
    string) and optionally `name`, `tool_call_id`, `reasoning_content` and `tool_calls`, a list of
    `{"id", "type": "function", "function": {"name", "arguments"}}`. `arguments` is a dictionary, or
    the original text if it is not a JSON object. If the last message is the assistant's and has no
    tool calls, the answer continues it.
    """

    messages: tuple[Mapping[str, Any], ...]
    parameters: GenerateParameters
    """`inputs`, special tokens and the tools' grammar are filled in by `ChatService`."""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required` or the name of one of `tools`."""
    parallel_tool_calls: bool = True
    tool_prompt: str | None = None
    """TGI's field: text that is appended to the last message if there are tools."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_sequences: int = 1
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to the rendered prompt."""
    add_generation_prompt: bool | None = None
    """None: true unless the answer continues the last message."""
    continue_final_message: bool | None = None
    """None: true if the last message is the assistant's and `add_generation_prompt` is not set."""
    may_be_rewritten: bool = False
    """Whether the template gets the messages in a strict form if it refuses them as they are."""
    allowed_tools: tuple[str, ...] | None = None
    """The names of the tools that may be called; None: all of `tools`."""

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The usable tools that may be called."""
        if self.allowed_tools is None:
            return self.usable_tools
        return tuple(tool for tool in self.usable_tools if tool.name in self.allowed_tools)

    @property
    def usable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the prompt describes; none if `tool_choice` is `none`."""
        return () if self.tool_choice == "none" else self.tools
