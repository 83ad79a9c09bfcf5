"""OpenAI's messages and tools, and what TGI's clients send in their place."""

from typing import Any

import pytest
from pydantic import ValidationError
from text_generation_router.chat.format import ToolSpec
from text_generation_router.chat.messages import (
    MessageBody,
    NamedToolChoice,
    ToolBody,
    to_messages,
    tool_choice_of,
)

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        ({"name": "f"}, ToolSpec("f")),
        ({"name": "f", "parameters": None, "strict": None}, ToolSpec("f")),
        (
            {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
            ToolSpec("f", "d", SCHEMA, True),
        ),
        ({"name": "f", "arguments": SCHEMA}, ToolSpec("f", None, SCHEMA)),
    ],
)
def test_tools(function: dict[str, Any], spec: ToolSpec) -> None:
    assert ToolBody.model_validate({"type": "function", "function": function}).to_spec() == spec


@pytest.mark.parametrize("function", [{}, {"name": ""}, {"name": "auto"}, {"name": 1}, {"x": 1}])
def test_tools_without_a_name_of_their_own(function: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ToolBody.model_validate({"function": function})


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        ("[1]", "[1]"),
        ('{"x', '{"x'),
    ],
)
def test_arguments(arguments: Any, parsed: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = MessageBody.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    assert body.to_message() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": parsed}}
        ],
    }


def test_results_have_the_name_of_their_function() -> None:
    call = {"id": "1", "function": {"name": "f", "parameters": {}}}
    bodies = [
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        {"role": "tool", "tool_call_id": "1", "content": "b", "name": "g"},
        {"role": "tool", "tool_call_id": "2", "content": "c"},
    ]
    first, *results = to_messages([MessageBody.model_validate(body) for body in bodies])
    assert first["reasoning_content"] == "hm"
    assert [result.get("name") for result in results] == ["f", "g", None]


@pytest.mark.parametrize(
    ("given", "thought"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning": "hm", "reasoning_content": None}, "hm"),
        ({"reasoning": "no", "reasoning_content": "hm"}, "hm"),
        ({"reasoning": None}, None),
    ],
)
def test_both_spellings_of_reasoning(given: dict[str, str | None], thought: str | None) -> None:
    message = MessageBody.model_validate({"role": "assistant", "content": "a", **given})
    assert message.to_message().get("reasoning_content") == thought


def test_choices() -> None:
    named = NamedToolChoice.model_validate({"function": {"name": "f"}})
    given = (None, "auto", "none", "required", "f", named)
    assert [tool_choice_of(choice) for choice in given] == [
        *("auto", "auto", "none", "required", "f", "f")
    ]
