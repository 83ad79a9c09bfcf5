"""Messages in a form that the template supports."""

from typing import Any

from text_generation_router.chat.conversation import (
    joined,
    plain_messages,
    strict_form,
    with_instructions,
)
from text_generation_router.chat.format import FORMATS

GENERIC = FORMATS["generic"]
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": "é"}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    {"role": "tool", "content": "c"},
    {"role": "tool", "content": "d"},
    {"role": "user", "content": "e"},
]


def test_a_template_that_knows_tools_gets_them() -> None:
    assert plain_messages(MESSAGES, "message.tool_calls", GENERIC) == MESSAGES


def test_a_template_without_tools_gets_text_and_alternating_roles() -> None:
    assert plain_messages(MESSAGES[:-1], "messages", GENERIC) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": 'b\n{"name": "f", "arguments": {"x": "é"}}'},
        {"role": "user", "content": "c\nd"},
    ]
    assert MESSAGES[1]["tool_calls"] == [CALL]


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": '{"x'}}
    [message] = plain_messages(
        [{"role": "assistant", "content": "", "tool_calls": [broken]}], "messages", GENERIC
    )
    assert message["content"] == '{"name": "f", "arguments": {"x}'


def test_instructions_need_no_system_message() -> None:
    system = {"role": "system", "content": "s"}
    user = {"role": "user", "content": "u"}
    assert with_instructions([system, user], "t") == [{**system, "content": "s\n\nt"}, user]
    assert with_instructions([user], "t") == [{**user, "content": "t\n\nu"}]


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_messages_of_one_role_are_one() -> None:
    calls = [{**CALL, "id": place} for place in "12"]
    messages = [
        *(said("user", "a"), said("user", ""), said("user", "b")),
        said("assistant", "c", reasoning_content="hm", tool_calls=calls[:1]),
        said("assistant", "d", tool_calls=calls[1:]),
        *(said("tool", "e"), said("tool", "f")),
    ]
    assert joined(messages, "user") == [said("user", "a\nb"), *messages[3:]]
    assert joined(messages, "user", "assistant") == [
        said("user", "a\nb"),
        said("assistant", "c\nd", reasoning_content="hm", tool_calls=calls),
        *messages[5:],
    ]


def test_strict_form() -> None:
    call, result = {**CALL, "id": "call_0123"}, {"tool_call_id": "call_0123"}
    messages = [
        *(said("system", "s"), said("user", "a"), said("system", "t")),
        said("assistant", "", tool_calls=[call]),
        *(said("tool", "b", **result), said("user", "c"), said("assistant", "d")),
    ]
    system, user, calling, tool, nothing, *others = strict_form(messages)
    assert (system, user) == (said("system", "s"), said("user", "a\nt"))
    short = tool["tool_call_id"]
    assert len(short) == 9 and short.isalnum() and calling["tool_calls"] == [{**call, "id": short}]
    assert nothing == said("assistant", "") and others == messages[-2:]
    first, *_ = strict_form(messages, has_system=False)
    assert first == said("user", "s\na\nt")


def test_ids_that_are_short_stay_as_they_are() -> None:
    result = said("tool", "b", tool_call_id="abcdefgh1")
    assert strict_form([result]) == [result]
