"""POST /v1/chat/completions on a running server."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.tests.serving import EOS_ID, Server, script_of, serve, shared_server

PATH = "/v1/chat/completions"
Json = dict[str, Any]

# ChatML, with tools and reasoning as Qwen's models have them.
TEMPLATE = """
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinks %}<think>
{% endif %}{% endif %}
{#- </think> #}"""
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER_TOOL: Json = {"type": "function", "function": {"name": "g"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


running, server = shared_server(serve, "hé! ", model_id="org/model", chat_template=TEMPLATE)


async def post(server: Server, **body: Any) -> httpx.Response:
    return await server.client.post(
        PATH, json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200} | body
    )


def chunks(response: httpx.Response) -> list[Json]:
    """The events of a stream, which must end as it should."""
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(events: list[Json]) -> list[Json]:
    """The choices that the chunks of a stream spell, as an answer has them; without ids."""
    choices: dict[int, Json] = {}
    for chunk in (chunk for event in events for chunk in event["choices"]):
        new = {"index": chunk["index"], "message": {"content": None, "refusal": None}}
        choice = choices.setdefault(chunk["index"], new | {"logprobs": None})
        assert "finish_reason" not in choice
        delta, message = chunk["delta"], choice["message"]
        message |= {"role": delta["role"]} if "role" in delta else {}
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call.pop("id") and call.pop("index") == len(calls)
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if chunk["logprobs"] is not None:
            logprobs = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"] = logprobs
            logprobs["content"] += chunk["logprobs"]["content"]
        if chunk["finish_reason"] is not None:
            choice["finish_reason"] = chunk["finish_reason"]
            choice |= {"stop_reason": chunk["stop_reason"]} if "stop_reason" in chunk else {}
    return [choices[index] for index in sorted(choices)]


def without_ids(answer: Json) -> list[Json]:
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            assert len(call.pop("id")) == 9
    choices = answer["choices"]
    assert isinstance(choices, list)
    return choices


async def both(server: Server, **body: Any) -> list[Json]:
    """The choices, which must be the same streamed and whole."""
    whole = await post(server, **body)
    assert whole.status_code == 200, whole.text
    choices = without_ids(whole.json())
    assert joined(chunks(await post(server, **body, stream=True))) == choices
    return choices


def last_prompt(server: Server) -> str:
    """What the shards were given last."""
    ids = server.shards.requests[-1].input_ids
    return b"".join(map(server.services.tokenizer.token_bytes, ids)).decode()


def writes(server: Server, text: str) -> None:
    server.shards.script = [*script_of(text), EOS_ID]


async def test_logprobs(server: Server) -> None:
    [choice] = await both(server, max_tokens=3, logprobs=True, top_logprobs=1)
    top = [{"token": "!", "logprob": -0.5, "bytes": [33]}]
    assert choice["logprobs"]["content"] == [
        {"token": "h", "logprob": -0.1, "bytes": [104], "top_logprobs": top},
        {"token": "\ufffd", "logprob": -0.2, "bytes": [0xC3], "top_logprobs": top},
        {"token": "\ufffd", "logprob": -0.3, "bytes": [0xA9], "top_logprobs": top},
    ]
    [choice] = await both(server, max_tokens=1, logprobs=True, top_logprobs=20)
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 20
    writes(server, "hm</think>a<b" + CALL)
    kwargs = {"chat_template_kwargs": {"thinks": True}}
    [choice] = await both(server, logprobs=True, tools=[TOOL], **kwargs)
    assert choice["message"]["content"] == "a<b"
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "<", "b"]


@pytest.mark.parametrize("content", ["a", "that", "t", "that a"])
async def test_logprobs_are_not_those_of_the_reasoning(server: Server, content: str) -> None:
    """Which has the same text, as has the marker between."""
    thought = "that a"
    writes(server, f"{thought}</think>{content}")
    kwargs = {"chat_template_kwargs": {"thinks": True}}
    [choice] = await both(server, logprobs=True, **kwargs)
    assert choice["message"]["content"] == content
    scored = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in scored) == content
    # The n-th token has the log-probability -n / 10.
    first = len(thought) + len("</think>") + 1
    places = [round(one["logprob"] * -10) for one in scored]
    assert places == [*range(first, first + len(content))]


async def test_reasoning(server: Server) -> None:
    writes(server, "<think>hm</think>\n\nyes")
    [choice] = await both(server)
    thought = {"reasoning_content": "hm", "reasoning": "hm"}
    message = {"role": "assistant", "refusal": None} | thought
    assert choice["message"] == message | {"content": "yes"}
    writes(server, "hm</think>yes")
    kwargs = {"chat_template_kwargs": {"thinks": True}}
    [choice] = await both(server, **kwargs)
    assert choice["message"] == message | {"content": "yes"}
    # What has to be JSON is the answer behind the thought.
    writes(server, "hm</think>{}")
    [choice] = await both(server, response_format={"type": "json_object"}, **kwargs)
    assert choice["message"] == message | {"content": "{}"}


async def test_parallel_tools_with_text_before(server: Server) -> None:
    writes(server, "Let me see.\n" + CALL + "\n" + CALL)
    [choice] = await both(server, tools=[TOOL])
    assert choice["message"]["content"] == "Let me see."
    assert len(choice["message"]["tool_calls"]) == 2
    events = chunks(await post(server, tools=[TOOL], stream=True))
    deltas = [e["choices"][0]["delta"] for e in events if "tool_calls" in e["choices"][0]["delta"]]
    starts = [delta["tool_calls"][0] for delta in deltas if "id" in delta["tool_calls"][0]]
    assert [(start["index"], start["function"]) for start in starts] == [
        (0, {"name": "f", "arguments": ""}),
        (1, {"name": "f", "arguments": ""}),
    ]
    assert starts[0]["id"] != starts[1]["id"]
    [choice] = await both(server, tools=[TOOL], max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "é'


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [{"content": "a"}]}, "messages.0.role", "required"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content", "string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0",
            "needs a string `text`",
        ),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "function"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "function"),
        ({"tools": [{"function": {"name": "none"}}]}, "tools.0", "none"),
        (
            {"tools": [TOOL], "response_format": {"type": "regex", "value": "a"}},
            "response_format",
            "mutually exclusive",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "`messages`"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "`self`"),
    ],
)
async def test_refused(server: Server, body: Json, param: str | None, words: str) -> None:
    for stream in (False, True):
        response = await post(server, **body, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]


async def test_tools_beside_a_format(server: Server) -> None:
    """The answer is one or the other; which text that allows is tested with the grammars."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    writes(server, CALL)
    [choice] = await both(server, tools=[TOOL], response_format=form)
    assert choice["message"]["tool_calls"] and choice["finish_reason"] == "tool_calls"
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": [{}]}}}
    error = (await post(server, tools=[TOOL], response_format=bad)).json()["error"]
    assert "`tools` and `response_format` can not be enforced" in error["message"]
    deep = {"type": "json_object", "value": '{"const":' + '{"a":' * 900 + "1" + "}" * 901}
    for tools in ([TOOL], []):
        answer = await post(server, tools=tools, response_format=deep)
        assert answer.status_code == 400 and "nest its values less" in answer.text


async def test_hints_are_told_and_defaults_are_not(server: Server) -> None:
    body = {"store": False, "modalities": ["text"], "service_tier": "auto", "functions": []}
    body |= {"logprobs": False, "top_logprobs": 0}
    hints = {"store": True, "reasoning_effort": "low", "verbosity": "high", "service_tier": "scale"}
    hints |= {"prediction": {"type": "content", "content": "x = 1"}}
    for stream in (False, True):
        assert "warning" not in (await post(server, **body, stream=stream)).headers
        answer = await post(server, **hints, stream=stream)
        named = "prediction, reasoning_effort, service_tier, store, verbosity"
        assert answer.headers["warning"] == f'299 - "changes nothing here: {named}"'
    for name in ("tgi", "dummy", "", "model", "org/model"):
        assert (await post(server, model=name)).status_code == 200


async def test_tool_prompt(server: Server) -> None:
    await post(server, tool_prompt="Use f!", tools=[TOOL])
    assert "Hi\n---\nUse f!<|im_end|>" in last_prompt(server)
    await post(server, tool_prompt="Use f!")
    assert "Use f!" not in last_prompt(server)


async def test_no_template(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        response = await post(server)
        assert response.status_code == 400
        assert "template not found" in response.json()["error"]["message"]
        assert server.services.metrics.request_failure.value(err="validation") == 1
