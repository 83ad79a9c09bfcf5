"""What a Responses request asks for, as a conversation: its tools, and its items as messages."""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from text_generation_router.api.fields import ANY_OBJECT, priority_of, schema_grammar
from text_generation_router.api.responses.schemas import (
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    InputItem,
    JsonSchemaFormat,
    MessageItem,
    OtherItem,
    Part,
    PlainFormat,
    ReasoningItem,
    ResponsesRequest,
    TextPart,
)
from text_generation_router.api.responses.tools import (
    AllowedTools,
    NamedTool,
    OtherTool,
    flat_name,
    served_tools,
    tools_left_out,
)
from text_generation_router.chat.conversation import Conversation, joined, tool_call, with_names
from text_generation_router.chat.messages import CalledFunction
from text_generation_router.errors import ToolError
from text_generation_router.fields import MOST_TOP_LOGPROBS, drawing
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters

Message = dict[str, Any]
_SERVED = "only functions and custom tools can be called here, alone or in a namespace"
_PREFIX = "plain1."


def conversation_of(body: ResponsesRequest) -> Conversation:
    """The conversation that the request carries on. Raises ToolError."""
    specs = tuple(tool.spec for tool in served_tools(body.tools or ()))
    choice, allowed = _choice(body, has_tools=bool(specs))
    return Conversation(
        messages=tuple(_messages(body)),
        tools=specs,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        may_be_rewritten=True,
        # As at OpenAI: an answer is always a new turn.
        add_generation_prompt=True,
        parameters=GenerateParameters(
            inputs="",
            sampling=drawing(body),
            max_new_tokens=body.max_output_tokens,
            top_n_tokens=body.top_logprobs if body.wants_logprobs else None,
            most_top_n_tokens=MOST_TOP_LOGPROBS,
            grammar=_grammar(body.text.format if body.text else None),
            deterministic=bool(body.deterministic),
            cache_salt=body.cache_salt,
            priority=priority_of(body.service_tier),
        ),
    )


def left_out(body: ResponsesRequest) -> Iterator[str]:
    """What of the request is left out, for the `warning` header."""
    yield from tools_left_out(body.tools or ())
    if isinstance(body.tool_choice, AllowedTools):
        yield from tools_left_out(body.tool_choice.tools)
    if not isinstance(body.input, str):
        for item in body.input:
            if isinstance(item, OtherItem):
                yield f"items of type {item.type}"


def _choice(body: ResponsesRequest, has_tools: bool) -> tuple[str, tuple[str, ...] | None]:
    """Which tool has to be called, and which may be; see `Conversation`. Raises ToolError."""
    names: tuple[str, ...] | None = None
    match body.tool_choice or "auto":
        case NamedTool() as named:
            return flat_name(named.namespace, named.name), None
        case OtherTool() as other:
            raise ToolError(f"`tool_choice` asks for a tool of type {other.type}; {_SERVED}")
        case AllowedTools() as allowed:
            found = [tool for tool in allowed.tools if isinstance(tool, NamedTool)]
            names = tuple(flat_name(tool.namespace, tool.name) for tool in found)
            has_tools = bool(names)
            choice = allowed.mode if has_tools or allowed.mode == "required" else "none"
        case word:
            choice = word
    if choice == "required" and body.tools and not has_tools:
        raise ToolError(f"`tool_choice` is 'required', but all tools are of other types; {_SERVED}")
    return choice, names


def _messages(body: ResponsesRequest) -> Iterator[Mapping[str, Any]]:
    """Everything said, as templates want it: with one system message at most in front, and turns
    of the user's that follow each other as one."""
    items: Sequence[InputItem] = (
        [MessageItem(role="user", content=body.input)]
        if isinstance(body.input, str)
        else [item for item in body.input if not isinstance(item, OtherItem)]
    )
    instructions = [] if body.instructions is None else [body.instructions]
    said = 0
    for item in items:
        if not isinstance(item, MessageItem) or item.role not in ("system", "developer"):
            break
        instructions.append(_text(item.content))
        said += 1
    if instructions:
        yield {"role": "system", "content": "\n\n".join(instructions)}
    yield from joined(with_names(_turns(items[said:])), "user")


def _turns(items: Sequence[InputItem]) -> Iterator[Message]:
    """The items as messages. Reasoning, a text and calls that follow each other are one message of
    the assistant's, in which reasoning comes first; reasoning alone is none."""
    made: list[Message] = []
    for message in map(_message, items):
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


def _message(item: InputItem) -> Message:
    """What one item says; of the assistant's message it may be a part."""
    match item:
        case ReasoningItem():
            return {"role": "assistant", "reasoning_content": _reasoning(item)}
        case FunctionCallItem() | CustomToolCallItem():
            arguments = (
                {"input": item.input}
                if isinstance(item, CustomToolCallItem)
                else CalledFunction(name=item.name, arguments=item.arguments).parsed_arguments
            )
            call = tool_call(item.call_id, flat_name(item.namespace, item.name), arguments)
            return {"role": "assistant", "tool_calls": [call]}
        case CallOutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        case _:
            assert isinstance(item, MessageItem)
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": _text(item.content)}


def _reasoning(item: ReasoningItem) -> str:
    written = item.encrypted_content or ""
    if not item.content and written.startswith(_PREFIX):
        with suppress(ValueError):  # another server wrote it
            return b64decode(written.removeprefix(_PREFIX), validate=True).decode()
    return "".join(part.text for part in item.content or item.summary)


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _grammar(asked: PlainFormat | JsonSchemaFormat | None) -> Grammar | None:
    if isinstance(asked, JsonSchemaFormat):
        return schema_grammar(asked.schema_)
    if asked is not None and asked.type == "json_object":
        return schema_grammar(ANY_OBJECT)
    return None


def write_encrypted(text: str) -> str:
    """The field for a reasoning of this text: in base64, and not encrypted.

    Nothing is stored here, and clients with `store: false` keep this field only. There is no secret
    in it: the client has the same text in `content`.
    """
    return _PREFIX + b64encode(text.encode()).decode()
