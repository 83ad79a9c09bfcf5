"""OpenAI's /v1/responses: items, events, refusals, and that streamed and whole answers are one."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.api.responses.schemas import ResponsesRequest
from text_generation_router.request import Grammar

from router.tests.chats import CALL, named_events, serve_chat
from router.tests.serving import Server, shared_server

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TEXT = f"<think>hm</think>Hé!{CALL}"


running, server = shared_server(serve_chat, TEXT, ends=True, any_model_name=False)


async def ask(server: Server, **body: Any) -> dict[str, Any]:
    response = await server.client.post("/v1/responses", json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


async def ask_stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post(
        "/v1/responses", json={"input": "hi", "stream": True} | body
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    events = named_events(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """The same without what is new in every answer, or depends on those before it."""
    if isinstance(value, dict):
        volatile = {"id", "item_id", "call_id", "created_at", "completed_at", "sequence_number"}
        volatile |= {"cached_tokens"}
        return {key: without_ids(part) for key, part in value.items() if key not in volatile}
    return [without_ids(part) for part in value] if isinstance(value, list) else value


async def test_reasoning_text_and_call(server: Server) -> None:
    answer = await ask(server, tools=[TOOL], temperature=0)
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert without_ids(message) == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hé!", "annotations": [], "logprobs": []}],
    }
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert json.loads(call["arguments"]) == {"x": 1}
    prefixes = [item["id"].partition("_")[0] for item in answer["output"]]
    assert prefixes == ["rs", "msg", "fc"] and call["call_id"].startswith("call_")
    usage = answer["usage"]
    assert usage["output_tokens"] == len(server.shards.script)
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


async def test_stream_and_whole_answer_are_one(server: Server) -> None:
    for body in ({"tools": [TOOL]}, {}, {"max_output_tokens": 9}, {"tools": [TOOL]} | LOGPROBS):
        events = await ask_stream(server, **body)
        whole = await ask(server, **body)
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


async def test_logprobs(server: Server) -> None:
    message = (await ask(server, **LOGPROBS))["output"][1]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs if one["token"] != "\ufffd").startswith("H!")
    assert [len(one["top_logprobs"]) for one in logprobs] == [1] * len(logprobs)


async def test_nothing_written_is_an_empty_message(tmp_path: Path) -> None:
    async with serve_chat(tmp_path, "x") as server:
        server.shards.script = server.shards.script[-1:]
        (message,) = (await ask(server))["output"]
        assert message["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"input": []}, 400, "input", "at least one item"),
        ({"input": [{"type": "reasoning", "summary": []}]}, 400, "input", "besides reasoning"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, 400, "input.0", "Items can be"),
        *(
            ({"input": [{"role": "user", "content": [part]}]}, 400, "input.0.content.0", words)
            for part, words in (
                ({"type": "input_image", "image_url": "data:"}, "no model that reads images"),
                ({"type": "input_file", "file_data": "data:"}, "no model that reads images or f"),
            )
        ),
        ({"conversation": "c"}, 400, "conversation", "nothing is stored"),
        ({"top_logprobs": 1}, 400, "top_logprobs", "needs message.output_text.logprobs"),
        ({"include": ["file_search_call.results"]}, 400, "include", "can only name"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata", "at most 16"),
        ({"tools": [TOOL | {"name": "auto"}]}, 400, "tools.0.name", "can not be called"),
        ({"model": "other"}, 404, "model", "not served"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    server: Server, body: dict[str, Any], status: int, param: str, words: str, stream: bool
) -> None:
    response = await server.client.post(
        "/v1/responses", json={"input": "hi", "stream": stream} | body
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


def conversation(**body: Any) -> Any:
    return ResponsesRequest.model_validate({"input": "hi"} | body).to_conversation()


def test_system_messages_in_front_are_one() -> None:
    messages = conversation(
        instructions="a",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
            {"role": "developer", "content": "d"},
        ],
    ).messages
    assert messages == (
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\ne"},
        {"role": "system", "content": "d"},
    )


async def test_encrypted_reasoning_comes_back_as_reasoning(server: Server) -> None:
    asked = {"include": ["reasoning.encrypted_content"], "store": False}
    assert "encrypted_content" not in (await ask(server))["output"][0]
    for body in (asked, asked | {"max_output_tokens": 9}):
        reasoning = (await ask(server, **body))["output"][0]
        last = (await ask_stream(server, **body))[-1]["response"]["output"][0]
        assert last["encrypted_content"] == reasoning["encrypted_content"]
        thought = reasoning["content"][0]["text"]
        assert thought and thought not in reasoning["encrypted_content"]
        turns = [{"role": "user", "content": "q"}, reasoning, {"role": "assistant", "content": "a"}]
        for kept in ("encrypted_content", "content"):
            turns[1] = {"type": "reasoning", "summary": [], kept: reasoning[kept]}
            assert conversation(input=turns).messages[1]["reasoning_content"] == thought


@pytest.mark.parametrize("field", ["gAAAAB…", "plain1.!", "plain1./w==", ""])
def test_encrypted_reasoning_of_others_is_not_read(field: str) -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    item = {"type": "reasoning", "summary": summary, "encrypted_content": field}
    turn, *_ = conversation(input=[item, {"role": "assistant", "content": "a"}]).messages
    assert turn["reasoning_content"] == "in short"


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'}
    messages = conversation(
        input=[
            {"role": "user", "content": "q"},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
            call,
            call | {"call_id": "c2", "arguments": "oops"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "reasoning", "id": "s", "summary": []},
            {"type": "message", "role": "assistant", "content": "two"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ]
    ).messages
    user, turn, result, two, no = messages
    assert user == {"role": "user", "content": "q"}
    assert (turn["content"], turn["reasoning_content"]) == ("wait", "hm")
    assert [c["function"]["arguments"] for c in turn["tool_calls"]] == [{"x": 1}, "oops"]
    assert result == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}
    assert (two["content"], no["content"]) == ("two", "no")


async def test_refusal_of_the_template_is_about_the_messages_as_sent(tmp_path: Path) -> None:
    template = (Path(__file__).parents[2] / "chat_templates/mistral-v0.3.jinja").read_text()
    async with serve_chat(tmp_path, "ok", template) as server:
        first = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        refused = await server.client.post("/v1/responses", json={"input": first})
        assert refused.status_code == 400 and "must alternate" in refused.text
        # What can be rewritten is.
        said = [*first[::-1], {"role": "developer", "content": "c"}, first[1]]
        assert (await ask(server, input=said))["output"][0]["content"][0]["text"] == "ok"
        # OpenAI's chat is as strict as the template, as in TGI.
        chat = {"model": "tgi", "messages": [{"role": "user", "content": "a"}] * 2}
        refused = await server.client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400 and "must alternate" in refused.text


def test_an_answer_is_a_new_turn_behind_an_assistant_too() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert conversation(input=turns).add_generation_prompt is True


def test_parameters() -> None:
    asked = conversation(temperature=0, top_p=0.5, max_output_tokens=7).parameters
    assert asked.sampling == {"do_sample": False}
    assert asked.max_new_tokens == 7 and asked.top_n_tokens is None
    asked = conversation(top_p=1).parameters
    assert asked.sampling == {"do_sample": True}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "string"}}
    grammar = conversation(text={"format": schema}).parameters.grammar
    assert grammar == Grammar("json_schema", '{"type":"string"}')
    grammar = conversation(text={"format": {"type": "json_object"}}).parameters.grammar
    assert grammar == Grammar("json_schema", '{"type":"object"}')
    assert conversation(text={"format": {"type": "text"}}).parameters.grammar is None
