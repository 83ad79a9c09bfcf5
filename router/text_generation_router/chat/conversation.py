"""A chat request, independent of the API that received it, and the forms of its messages."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import Any

from text_generation_router.chat.format import ChatFormat, ToolSpec
from text_generation_router.validation import GenerateParameters

Message = Mapping[str, Any]
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
# In templates that join the arguments of a call, which so must be text, to other text; and in those
# that show calls only of a message without content.
_JOINED_ARGUMENTS = re.compile(r"\barguments['\"]?\]?\s*\+")
_NO_CONTENT = re.compile(r"\[['\"]content['\"]\] is none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages so far, and the parameters of the next one.

    `messages` have the form that Hugging Face's templates expect: `role`, `content` (always a
    string) and optionally `name`, `tool_call_id`, `reasoning_content` and `tool_calls`, a list of
    `{"id", "type": "function", "function": {"name", "arguments"}}`. `arguments` is a dictionary, or
    the original text if it is not a JSON object. If the last message is the assistant's and has no
    tool calls, the answer continues it.
    """

    messages: tuple[Message, ...]
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


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """One of a message's `tool_calls`, also as OpenAI's answers have them."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def with_names(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The same messages; a tool's result without a name gets the name of the called function."""
    made = tuple(messages)
    names = {
        call["id"]: call["function"]["name"]
        for message in made
        for call in message.get("tool_calls", ())
    }
    for message in made:
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))):
            message.setdefault("name", name)
    return made


def plain_messages(
    messages: Sequence[Message], template_source: str, chat_format: ChatFormat
) -> list[Message]:
    """The messages, with tool calls and results as text where the template does not support them:
    calls in the chat format, results as user messages."""
    plain: list[Message] = []
    # Texts to append, by the index of their message.
    behind: defaultdict[int, list[str]] = defaultdict(list)
    for message in messages:
        if message.get("tool_calls") and "tool_calls" not in template_source:
            message = _with_calls_as_text(message, chat_format)
        if message["role"] == "tool" and "tool" not in template_source:
            message = {"role": "user", "content": message["content"]}
            if plain and plain[-1]["role"] == "user":  # templates require alternating roles
                behind[len(plain) - 1].append(message["content"])
                continue
        plain.append(message)
    for place, contents in behind.items():
        content = "\n".join([plain[place]["content"], *contents])
        plain[place] = {"role": "user", "content": content}
    return plain


def fitted(messages: Sequence[Message], template_source: str) -> list[Message]:
    """The messages with their fields as a template reads them, where templates differ."""
    has_thinking = "message.thinking" in template_source
    needs_text = _JOINED_ARGUMENTS.search(template_source) is not None
    needs_none = _NO_CONTENT.search(template_source) is not None
    made: list[Message] = []
    for message in messages:
        fields, calls = dict(message), message.get("tool_calls")
        # Templates that know `thinking` refuse it beside the content of a call.
        if has_thinking and "reasoning_content" in message and not (calls and message["content"]):
            fields["thinking"] = message["reasoning_content"]
        if calls and needs_text:
            fields["tool_calls"] = [
                {**call, "function": {**function, "arguments": _json(function["arguments"])}}
                for call in calls
                for function in [call["function"]]
            ]
        if calls and needs_none:
            fields["content"] = message["content"] or None
        made.append(fields)
    return made


def joined(messages: Sequence[Message], *roles: str) -> list[Message]:
    """The messages; those of one of the roles that follow each other are one."""
    made: list[Message] = []
    for role, group in groupby(messages, key=itemgetter("role")):
        turn = list(group)
        if len(turn) == 1 or role not in roles:
            made += turn
            continue
        whole: dict[str, Any] = {}
        for message in reversed(turn):  # of other fields the first one counts
            whole |= message
        whole["content"] = "\n".join(filter(None, (message["content"] for message in turn)))
        if calls := [call for message in turn for call in message.get("tool_calls", ())]:
            whole["tool_calls"] = calls
        made.append(whole)
    return made


def strict_form(messages: Sequence[Message], *, has_system: bool = True) -> list[Message]:
    """The messages as the strictest templates accept them, whose roles must alternate.

    A system message that is not the first, or any if not `has_system`, becomes the user's. Between
    a tool's result and the user stands an empty answer. Messages of one role are one. Ids of calls
    have nine letters and digits.
    """
    made: list[Message] = []
    for message in messages:
        named = dict(message)
        if named["role"] == "system" and (made or not has_system):
            named["role"] = "user"
        if named["role"] == "user" and made and made[-1]["role"] == "tool":
            made.append({"role": "assistant", "content": ""})
        if "tool_call_id" in named:
            named["tool_call_id"] = _short_id(named["tool_call_id"])
        if calls := named.get("tool_calls"):
            named["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in calls]
        made.append(named)
    return joined(made, "user", "assistant")


def _short_id(call_id: str) -> str:
    """The same one for the same id, so that the prefix cache knows the prompt."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return sha256(call_id.encode()).hexdigest()[:9]


def with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with `text` after the system message or before the first message.

    No system message is added, because some templates refuse one.
    """
    first, *others = messages
    parts = [first["content"], text] if first["role"] == "system" else [text, first["content"]]
    return [{**first, "content": "\n\n".join(parts)}, *others]


def _with_calls_as_text(message: Message, chat_format: ChatFormat) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(function["name"], _json(function["arguments"])) for function in functions]
    parts = [message["content"], chat_format.write_calls(calls)]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, parts))}


def _json(arguments: Any) -> str:
    """The arguments as text; they already are text if they were not a JSON object."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
