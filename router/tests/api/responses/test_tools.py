"""Tools of /v1/responses as Codex CLI sends them: in namespaces, of free text, of other types."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.api.responses.responses import InputReader
from text_generation_router.api.responses.schemas import ResponsesRequest

from router.tests.api.openai.test_chat import last_prompt
from router.tests.api.responses.test_responses import without_ids
from router.tests.chats import named_events, serve_chat
from router.tests.serving import Server, shared_server

CLOSE = {"type": "function", "name": "close", "strict": False, "parameters": {"type": "object"}}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [CLOSE | {"description": "Ends one."}, CLOSE | {"name": "wait"}, {"type": "other"}],
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Changes a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SEARCH = {"type": "web_search", "external_web_access": True}
# The fields and items of Codex CLI 0.169.0, in words of our own.
CODEX: dict[str, Any] = {
    "model": "tgi",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0123",
    "client_metadata": {"session_id": "0123"},
    "text": {"verbosity": "medium"},
    "tools": [CLOSE | {"name": "run"}, AGENTS, PATCH, SEARCH],
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {
            "type": "message",
            "role": "developer",
            "content": [
                {"type": "input_text", "text": "Skills: none."},
                {"type": "input_text", "text": "No sandbox."},
            ],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<cwd>/</cwd>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
    ],
}


def call(name: str, arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<think>hm</think><tool_call>\n{written}\n</tool_call>"


async def answer(server: Server, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The whole response, equal whether streamed or not, its events, and the warning."""
    streamed = await server.client.post("/v1/responses", json=CODEX | body)
    assert streamed.status_code == 200, streamed.text
    events = named_events(streamed.text)
    whole = await server.client.post("/v1/responses", json=CODEX | body | {"stream": False})
    assert without_ids(events[-1]["response"]) == without_ids(whole.json())
    assert streamed.headers["warning"] == whole.headers["warning"]
    return whole.json(), events, whole.headers["warning"]


def conversation(**body: Any) -> Any:
    return ResponsesRequest.model_validate(CODEX | body).to_conversation()


async def test_a_function_of_a_namespace_is_called_and_answered(tmp_path: Path) -> None:
    async with serve_chat(tmp_path, call("agents__close", {"x": 1})) as server:
        response, _, warning = await answer(server)
        assert last_prompt(server) == (
            "[run,agents__close,agents__wait,patch]<system>Be brief.\n\nSkills: none.No sandbox."
            "<user><cwd>/</cwd>\nGo<assistant>"
        )
        reasoning, made = response["output"]
        assert (made["type"], made["namespace"], made["name"]) == (
            "function_call",
            "agents",
            "close",
        )
        assert json.loads(made["arguments"]) == {"x": 1}
        assert warning == (
            '299 - "changes nothing here: tools of type other, tools.2.format, '
            'tools of type web_search"'
        )
        assert response["tools"][-1] == SEARCH
        output = {
            "type": "function_call_output",
            "call_id": made["call_id"],
            "output": [{"type": "input_text", "text": "closed"}],
        }
        del reasoning["content"]  # some clients keep the encrypted content only
        await answer(server, input=[*CODEX["input"], reasoning, made, output])
        assert last_prompt(server).endswith(
            "<assistant>(hm)<tool_call>agents__close 1</tool_call><tool agents__close>closed"
            "<assistant>"
        )


async def test_a_custom_tool_gets_a_text(tmp_path: Path) -> None:
    text = '*** "a"\n\t\\ é 🙂'
    async with serve_chat(tmp_path, call("patch", {"input": text})) as server:
        response, events, _ = await answer(server)
        made = response["output"][1]
        assert (made["type"], made["name"], made["input"]) == ("custom_tool_call", "patch", text)
        deltas = [
            e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"
        ]
        assert "".join(deltas) == text and len(deltas) > 5
        (done,) = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
        assert done["input"] == text
        output = {"type": "custom_tool_call_output", "call_id": made["call_id"], "output": "ok"}
        conversed = conversation(input=[*CODEX["input"], made, output]).messages
        assert conversed[-2]["tool_calls"][0]["function"] == {
            "name": "patch",
            "arguments": {"input": text},
        }
        assert (conversed[-1]["name"], conversed[-1]["content"]) == ("patch", "ok")


async def test_a_custom_call_that_is_cut_off(tmp_path: Path) -> None:
    async with serve_chat(tmp_path, call("patch", {"input": "abcdef"})) as server:
        written = len('<think>hm</think><tool_call>\n{"name": "patch", "arguments": {"input": "abc')
        response, *_ = await answer(server, max_output_tokens=written)
    made = response["output"][1]
    assert (made["status"], made["input"]) == ("incomplete", "abc")


def test_the_model_is_told_what_a_namespace_and_a_grammar_are() -> None:
    _, close, wait, patch = conversation().tools
    assert close.description == "Other agents.\n\nEnds one." and wait.description is None
    assert patch.description.startswith("Changes a file.") and "start: /.+/" in patch.description
    assert patch.parameters["required"] == ["input"]


async def test_items_that_are_not_served_are_named(server: Server) -> None:
    items = [
        *CODEX["input"],
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search"}},
        {"type": "web_search_call", "id": "x", "action": {"type": "search"}},
        {"type": "mcp_call", "name": "n", "arguments": "{}", "server_label": "s"},
        {"type": "tool_search_output", "call_id": "d", "tools": [CLOSE]},
    ]
    tools = [{"type": "mcp", "server_label": "s"}, {"type": "local_shell"}]
    _, _, warning = await answer(server, input=items, tools=tools)
    assert warning == (
        '299 - "changes nothing here: tools of type mcp, tools of type local_shell, '
        "items of type local_shell_call, items of type local_shell_call_output, "
        'items of type web_search_call, items of type mcp_call, items of type tool_search_output"'
    )
    assert last_prompt(server).endswith("Go<assistant>")


async def test_a_long_warning_is_cut(server: Server) -> None:
    *_, warning = await answer(server, tools=[{"type": f"kind_{i}"} for i in range(999)])
    assert warning.endswith(', tools of type kind_31, and more"')


@pytest.mark.parametrize(
    ("choice", "expected", "allowed"),
    [
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents__close", None),
        ({"type": "custom", "name": "patch"}, "patch", None),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [SEARCH, PATCH]},
            "required",
            ("patch",),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}, "none", ()),
    ],
)
def test_tool_choice(choice: Any, expected: str, allowed: tuple[str, ...] | None) -> None:
    asked = conversation(tool_choice=choice)
    assert (asked.tool_choice, asked.allowed_tools) == (expected, allowed)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": SEARCH}, "tool_choice", "a tool of type web_search; only functions and"),
        ({"tool_choice": "required", "tools": [SEARCH]}, "tool_choice", "are of other types"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}},
            "tool_choice",
            "are of other types",
        ),
        ({"tool_choice": {"type": "function", "name": "close"}}, "tool_choice", "close not found"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({"tools": [AGENTS, CLOSE | {"name": "agents__close"}]}, "tools", "the same name"),
        ({"tools": [{"name": "x"}]}, "tools.0", "needs a `type`"),
        ({"tools": [{"type": "a\r\nb: c"}]}, "tools.0.type", "match"),
        ({"input": [{"type": "a\r\nb: c"}]}, "input.0.type", "match"),
        ({"input": [{"type": "web_search_call"}]}, "input", "at least one item"),
    ],
)
async def test_refusals(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    response = await server.client.post("/v1/responses", json=CODEX | body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("text", ["", "plain", 'q" \\ / \b\f\n\r\t', "é€🙂", "\x00\u2028"])
@pytest.mark.parametrize("escapes", [True, False])
def test_reading_input_character_by_character(text: str, escapes: bool) -> None:
    reader = InputReader()
    written = ' {\n "input" : ' + json.dumps(text, ensure_ascii=escapes) + "} "
    assert "".join(map(reader.feed, written)) == text
    assert InputReader().feed(written) == text


def test_reading_half_a_pair() -> None:
    assert InputReader().feed('{"input": "a\\ud83db"') == "a\ufffdb"
    assert InputReader().feed('{"input": "a\\ud83d\\ude4') == "a"


def test_only_the_first_half_of_a_pair_waits() -> None:
    pieces = ["\\u00e9", "\\uDE42", "\\uD83D", "\\ud83d", "\\ud", "e42", "\\ud83d", "\\u0041\\"]
    reader = InputReader()
    assert reader.feed('{"input": "') == ""
    known = ["é", "\ufffd", "", "\ufffd", "", "🙂", "", "\ufffdA"]
    assert [reader.feed(piece) for piece in pieces] == known


running, server = shared_server(serve_chat, "<think>hm</think>Hi", ends=True)
