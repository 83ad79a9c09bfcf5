"""What clients of OpenAI and Anthropic send and read, each as at its vendor."""

from pathlib import Path
from typing import Any

import pytest
from text_generation_router.api.errors import RequestError
from text_generation_router.api.openai.completions import first_ids
from text_generation_router.text.tokenizer import Tokenizer

from router.tests.api.openai.test_chat import last_prompt
from router.tests.chats import CALL, TEMPLATE, serve_chat
from router.tests.serving import BOS_ID, EOS_ID, Server, script_of, serve, shared_server
from router.tests.tiny_tokenizer import tiny_tokenizer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


running, server = shared_server(serve_chat, f"<think>hm</think>Hé!{CALL}", ends=True)


async def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    given = {"messages": [USER], "max_tokens": 200, "model": "tgi", "input": "hi"}
    response = await server.client.post(path, json=given | body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


async def test_a_template_that_wants_the_user_last_is_no_error(tmp_path: Path) -> None:
    strict = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(strict + TEMPLATE)
    async with serve(tmp_path) as server:
        for path in (MESSAGES, CHAT):
            last = {"role": "assistant", "content": "I am "}
            await ask(server, path, messages=[USER, last], max_tokens=2)
            assert last_prompt(server) == "<user>hi<assistant>I am "


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(server: Server, mode: str) -> None:
    allowed = {"mode": mode, "tools": [function("add")]}
    choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": allowed}
    tools = [function("add"), function("other")]
    await ask(server, CHAT, tools=tools, tool_choice=choice)
    grammar = server.shards.requests[-1].grammar
    assert "add" in grammar and "other" not in grammar
    # The model is told of all of them, so that its prompt stays what it was.
    assert last_prompt(server).startswith("[add,other]")
    await ask(server, CHAT, tools=tools, tool_choice=mode)
    assert "other" in server.shards.requests[-1].grammar
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "add"}]}
    listed = [{"type": "function", "name": name} for name in ("add", "other")]
    answer = await ask(server, RESPONSES, tools=listed, tool_choice=flat)
    assert answer["tool_choice"] == flat
    # It is the first one again, which was compiled already.
    assert server.shards.requests[-1].grammar == grammar
    assert server.shards.grammars.count(grammar) == 1


async def test_roles(server: Server) -> None:
    called = {"name": "add", "arguments": '{"x": 1}'}
    messages = [
        {"role": "developer", "content": "d"},
        USER,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "add", "content": "2"},
    ]
    await ask(server, CHAT, messages=messages)
    told = "<system>d<user>hi<assistant><tool_call>add 1</tool_call><tool add>2<assistant>"
    assert last_prompt(server) == told
    # Other roles are the template's affair.
    await ask(server, CHAT, messages=[{"role": "wizard", "content": "w"}])
    assert last_prompt(server) == "<wizard>w<assistant>"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("Hé!", 0),
        ("<thin air", 0),
        ("  <think>hm</think> Hé!", len("  <think>hm</think>")),
        ("<think></think>Hé!", len("<think></think>")),
        # Cut while it thinks, so that all of it is reasoning.
        ("<think>hm", len("<think>hm") + 1),
    ],
)
async def test_reasoning_tokens_are_counted_up_to_the_end_marker(
    server: Server, script: str, expected: int
) -> None:
    server.shards.script = [*script_of(script), EOS_ID]
    usage = (await ask(server, CHAT))["usage"]
    assert usage["completion_tokens"] == len(script.encode()) + 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
    usage = (await ask(server, RESPONSES))["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": expected}


async def test_an_empty_prompt_starts_from_the_first_token(server: Server) -> None:
    path = "/v1/completions"
    for prompt in ("", ["", "a"]):
        answer = await ask(server, path, prompt=prompt, max_tokens=2, messages=None)
        assert [choice["text"] for choice in answer["choices"]] == ["<t"] * (1 + bool(prompt))
    body = {"prompt": "", "max_tokens": 1, "logprobs": 0}
    answer = await ask(server, path, **body, echo=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("<", ["<"])
    assert choice["logprobs"]["text_offset"] == [0]
    assert answer["usage"]["prompt_tokens"] == 1
    assert server.shards.requests[-1].input_ids == (BOS_ID,)


def plain_tokenizer(**special: str) -> Tokenizer:
    """A tokenizer that makes no token of no text."""
    return Tokenizer(tiny_tokenizer(["a"], ["<b>", "<e>"]), special, num_workers=1)


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"bos_token": "<b>", "eos_token": "<e>"}, [1]),
        ({"eos_token": "<e>"}, [2]),
        ({"bos_token": "<x>", "eos_token": "<e>"}, [2]),
        ({}, None),
    ],
)
async def test_an_empty_prompt_starts_from_bos_or_eos(
    special: dict[str, str], expected: list[int] | None
) -> None:
    tokenizer = plain_tokenizer(**special)
    if expected is not None:
        assert await first_ids(tokenizer) == expected
        return
    with pytest.raises(RequestError, match="`prompt` cannot be empty"):
        await first_ids(tokenizer)
