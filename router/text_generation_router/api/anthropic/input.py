"""What a Messages request asks for, as a conversation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from text_generation_router.api.anthropic.schemas import (
    ContentBlock,
    CountTokensRequest,
    DocumentBlock,
    ForcedToolChoice,
    MessageParam,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from text_generation_router.api.grammars import schema_grammar
from text_generation_router.chat.conversation import Conversation, joined
from text_generation_router.chat.format import ToolSpec
from text_generation_router.fields import drawing
from text_generation_router.validation import GenerateParameters

Message = dict[str, Any]

# Anthropic documents no limit; each stop sequence costs time at every token.
_MOST_STOPS = 128
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation_of(body: CountTokensRequest) -> Conversation:
    """The conversation that the request carries on; one that only counts has no parameters."""
    choice = body.tool_choice
    return Conversation(
        messages=tuple(_messages(body)),
        tools=tuple(
            ToolSpec(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in body.tools
        ),
        tool_choice=_choice(choice),
        may_be_rewritten=True,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        template_kwargs={}
        if body.thinking is None
        else {"enable_thinking": body.thinking.type != "disabled"},
        parameters=_parameters(body)
        if isinstance(body, MessagesRequest)
        else GenerateParameters(inputs=""),
    )


def _parameters(body: MessagesRequest) -> GenerateParameters:
    form = body.text_format
    return GenerateParameters(
        inputs="",
        **drawing(body.temperature, body.top_p, body.top_k),
        max_new_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences),
        most_stop_sequences=_MOST_STOPS,
        grammar=None if form is None else schema_grammar(form.schema_),
        deterministic=bool(body.deterministic),
        cache_salt=body.cache_salt,
    )


def _choice(choice: ToolChoice | ForcedToolChoice | None) -> str:
    if isinstance(choice, ForcedToolChoice):
        return choice.name
    return "auto" if choice is None else _CHOICES[choice.type]


def _messages(body: CountTokensRequest) -> Iterator[Mapping[str, Any]]:
    """The messages; turns of the user's that follow each other are one, as templates want it."""
    names = {
        block.id: block.name
        for message in body.messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, ToolUseBlock)
    }
    if body.system is not None:
        yield {"role": "system", "content": text_of(body.system)}
    made = [message for param in body.messages for message in _split(param, names)]
    if not made:  # nothing but redacted thoughts
        made.append(_message(body.messages[-1].role, []))
    yield from joined(made, "user")


def _split(param: MessageParam, names: dict[str, str]) -> Iterator[Message]:
    """A message of Anthropic's as messages of which each tool's result is one of its own."""
    if isinstance(param.content, str):
        yield {"role": param.role, "content": param.content}
        return
    for block in param.content:
        if isinstance(block, ToolResultBlock):
            yield _result(block, names)
    apart = (ToolResultBlock, RedactedThinkingBlock)
    others = [block for block in param.content if not isinstance(block, apart)]
    if others or not param.content:
        yield _message(param.role, others)


def _message(role: str, blocks: Sequence[ContentBlock]) -> Message:
    message: Message = {
        "role": role,
        "content": text_of(
            [block for block in blocks if isinstance(block, TextBlock | DocumentBlock)]
        ),
    }
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    if uses := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = [
            {
                "id": use.id,
                "type": "function",
                "function": {"name": use.name, "arguments": use.input},
            }
            for use in uses
        ]
    return message


def _result(block: ToolResultBlock, names: dict[str, str]) -> Message:
    """Templates have no place for `is_error`, so the text says it."""
    text = text_of(block.content)
    content = f"Error: {text}" if block.is_error else text
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    name = names.get(block.tool_use_id)
    return message if name is None else {**message, "name": name}
