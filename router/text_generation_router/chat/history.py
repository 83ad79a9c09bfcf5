"""Messages of a chat, in a form that the chat template supports."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from text_generation_router.chat.format import ChatFormat

Message = Mapping[str, Any]


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
