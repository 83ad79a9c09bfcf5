"""Messages in a form that the template supports."""

from typing import Any

from text_generation_router.chat.format import FORMATS
from text_generation_router.chat.history import plain_messages, with_instructions

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
