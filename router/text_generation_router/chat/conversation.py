"""What a chat request asks for, the same for every API that has chats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from text_generation_router.chat.format import ToolSpec
from text_generation_router.validation import GenerateParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages so far, and how the next one is to be written.

    `messages` are as Hugging Face's templates want them: `role`, `content` (always a string) and,
    where they are known, `name`, `tool_call_id`, `reasoning_content` and `tool_calls`, a list of
    `{"id", "type": "function", "function": {"name", "arguments"}}`. `arguments` is a dictionary, or
    the text as it came where that text is not a JSON object. If the last message is the
    assistant's, and not a tool call, the answer continues it.
    """

    messages: tuple[Mapping[str, Any], ...]
    parameters: GenerateParameters
    """`inputs`, special tokens and the tools' grammar are filled in by `ChatService`."""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required` or the name of one of `tools`."""
    parallel_tool_calls: bool = True
    tool_prompt: str | None = None
    """TGI's: a text put behind the last message where there are tools."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_sequences: int = 1
    add_special_tokens: bool = False
    """Those of the tokenizer, before what the template has written."""
    add_generation_prompt: bool | None = None
    """None: unless the answer continues the last message."""
    continue_final_message: bool | None = None
    """None: if that is the assistant's and nothing is said of a generation prompt."""
    allowed_tools: tuple[str, ...] | None = None
    """The names of the only ones of `tools` that may be called; None: all of them."""

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """Those of the usable tools that may be called."""
        if self.allowed_tools is None:
            return self.usable_tools
        return tuple(tool for tool in self.usable_tools if tool.name in self.allowed_tools)

    @property
    def usable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the model is told about: none of them where none may be called."""
        return () if self.tool_choice == "none" else self.tools
