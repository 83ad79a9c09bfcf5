"""Anthropic's /v1/messages: blocks, events, errors, and streamed and whole answers are one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from text_generation_router.api import answers
from text_generation_router.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from text_generation_router.api.errors import end_as_anthropic
from text_generation_router.errors import ContextLengthError
from text_generation_router.request import Grammar

from router.tests.chats import CALL, named_events, serve_chat
from router.tests.serving import Server, shared_server

TOOL = {"name": "add", "input_schema": {"type": "object"}}
TEXT = f"<think>hm</think>Hé!{CALL}"
BODY = {"model": "tgi", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}


running, server = shared_server(serve_chat, TEXT, ends=True, any_model_name=False)


async def ask(server: Server, **body: Any) -> dict[str, Any]:
    response = await server.client.post("/v1/messages", json=BODY | body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


async def ask_stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post("/v1/messages", json=BODY | {"stream": True} | body)
    assert response.status_code == 200, response.text
    return named_events(response.text)


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events spell, as a client puts it together."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[-1] == {"type": "message_stop"}
    message = events[0]["message"]
    pieces: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces.append([])
        elif event["type"] == "content_block_delta":
            ((name, text),) = [(k, v) for k, v in event["delta"].items() if k != "type"]
            if name == "signature":
                message["content"][event["index"]][name] += text
            else:
                pieces[event["index"]].append(text)
        elif event["type"] == "message_delta":
            assert message["usage"] == event["usage"] | {"output_tokens": 0}
            message |= event["delta"] | {"usage": event["usage"]}
    for block, texts in zip(message["content"], pieces, strict=True):
        text = "".join(texts)
        is_call = block["type"] == "tool_use"
        block["input" if is_call else block["type"]] = json.loads(text) if is_call else text
    assert isinstance(message, dict)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Nor how much of the prompt was cached: for whoever asks again it is more."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = message["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    changed = {"content": blocks, "usage": counted}
    return {key: value for key, value in message.items() if key != "id"} | changed


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"tools": [TOOL]}, "tool_use", None),
        ({}, "end_turn", None),
        ({"max_tokens": 20}, "max_tokens", None),
        ({"stop_sequences": ["x", "!"]}, "stop_sequence", "!"),
        ({"stop_sequences": [*"xyzw", "!"]}, "stop_sequence", "!"),
    ],
)
async def test_stop_reasons_and_streams(
    server: Server, body: dict[str, Any], reason: str, sequence: str | None
) -> None:
    whole = await ask(server, **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert without_ids(accumulated(await ask_stream(server, **body))) == without_ids(whole)
    if sequence:
        assert whole["content"][-1]["text"] == "Hé"


@pytest.mark.parametrize("body", [{}, {"max_tokens": 9}], ids=["whole", "cut off"])
async def test_thinking_ends_with_a_signature(server: Server, body: dict[str, Any]) -> None:
    events = await ask_stream(server, **body)
    thinking = [event for event in events if event.get("index") == 0]
    kinds = [event.get("delta", event)["type"] for event in thinking]
    assert kinds[0] == "content_block_start" and thinking[0]["content_block"]["signature"] == ""
    assert kinds.count("signature_delta") == 1
    assert kinds[-2:] == ["signature_delta", "content_block_stop"]
    # It comes back with the thinking, and is not read.
    (block, *_) = accumulated(events)["content"]
    assert block["signature"] == thinking[-2]["delta"]["signature"] != ""
    turns = [BODY["messages"][0], {"role": "assistant", "content": [block]}]
    answer = await server.client.post("/v1/messages", json=BODY | {"messages": turns})
    assert answer.status_code == 200, answer.text


async def test_keep_alive_is_a_ping(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.05)
    server.shards.delay_s = 0.2
    events = await ask_stream(server, max_tokens=2)
    assert [event["type"] for event in events].count("ping") > 2


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: "),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences.0: "),
        ({"stop_sequences": ["x"] * 129}, 400, "invalid_request_error", "`stop_sequences`"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", ""),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "no `tools`"),
        ({"container": "c"}, 400, "invalid_request_error", "container: not supported"),
        ({"model": "claude"}, 404, "not_found_error", "not served"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    server: Server, body: dict[str, Any], status: int, kind: str, words: str, stream: bool
) -> None:
    response = await server.client.post("/v1/messages", json=BODY | {"stream": stream} | body)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind
    assert words in response.json()["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
TEXT_BLOCK = {"type": "text", "text": "a"}


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "u", "content": list(blocks)}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([TEXT_BLOCK, IMAGE], "messages.1.content.1.image: this model reads text only"),
        ([PDF], "messages.1.content.0.document: this model reads text only"),
        (
            [TEXT_BLOCK, result(IMAGE)],
            "messages.1.content.1.tool_result.content.0.image: this model reads text only",
        ),
        (
            [{"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}],
            "messages.1.content.0.document: this model reads text only",
        ),
        (
            [{"type": "text", "text": 5}],
            "messages.1.content.0.text.text: Input should be a valid string. Given: 5",
        ),
        ([result({"type": "text"})], "messages.1.content.0.tool_result.content.0.text.text: Field"),
        ([{"type": "video"}], "messages.1.content.0.video: blocks can be of type text, document"),
        (["a"], "messages.1.content.0: blocks can be of type text, document"),
        ([{"type": ["a"]}], "messages.1.content.0."),
        (5, "messages.1.content: "),
    ],
)
async def test_the_path_leads_to_the_block(server: Server, blocks: Any, message: str) -> None:
    messages = [BODY["messages"][0], {"role": "user", "content": blocks}]  # type: ignore[index]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await server.client.post(path, json=BODY | {"messages": messages})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(message)
        # Claude Code removes what such a path names.
        assert ("only" in message) is (re.search(MEDIA_PATH, error["message"]) is not None)


@pytest.mark.parametrize(
    ("num_tokens", "sentence"),
    [
        (501, "prompt is too long: 501 tokens > 500 maximum"),
        (
            100,
            "input length and `max_tokens` exceed context limit: 100 + 600 > 600, decrease input "
            "length or `max_tokens` and try again",
        ),
    ],
)
def test_numbers_of_the_context_are_where_claude_code_reads_them(
    num_tokens: int, sentence: str
) -> None:
    error = ContextLengthError(
        num_prompt_tokens=num_tokens,
        max_new_tokens=600,
        max_input_tokens=500,
        max_total_tokens=600,
    )
    [told] = named_events(end_as_anthropic(error).decode())
    assert told["error"] == {"type": "invalid_request_error", "message": sentence}


MEDIA_PATH = (
    r"^messages[.[](\d+)[\].]+content[.[](\d+)[\].]+"
    r"(?:tool_result[.[]content[.[]\d+[\].]+)?(image|document|pdf)"
)


async def test_errors_have_the_id_of_the_request(server: Server) -> None:
    for body, headers in ((BODY | {"max_tokens": 0}, {}), (BODY, {"x-request-id": "mine"})):
        asked = body | {"temperature": -1}
        response = await server.client.post("/v1/messages", json=asked, headers=headers)
        assert response.json()["request_id"] == response.headers["request-id"]
    assert response.json()["request_id"] == "mine"
    response = await server.client.post("/v1/messages/nope")
    assert response.json()["request_id"] == response.headers["request-id"]


async def test_errors_of_the_framework(tmp_path: Path) -> None:
    async with serve_chat(tmp_path, "x", api_key=("Key",), max_concurrent_requests=1) as server:
        post = server.client.post
        headers = {"x-api-key": "Key"}
        response = await post("/v1/messages/nope", json=BODY, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        large = {"content-type": "application/json", **headers}
        response = await post("/v1/messages", content=b"x" * 3_000_000, headers=large)
        assert response.json()["error"]["type"] == "request_too_large"
        with server.services.infer.admitted(1):
            response = await post("/v1/messages", json=BODY, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1


def conversation(**body: Any) -> Any:
    return MessagesRequest.model_validate(BODY | body).to_conversation()


def test_messages() -> None:
    use = {"type": "tool_use", "id": "u1", "name": "add", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "u1", "content": "2", "is_error": True}
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": None}]
    messages = conversation(
        system=text,
        messages=[
            {"role": "user", "content": "q"},
            {"role": "user", "content": "r"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "wait"},
                    use,
                ],
            },
            {"role": "user", "content": [result, *text]},
            {"role": "user", "content": [result | {"tool_use_id": "u2", "content": text}]},
        ],
    ).messages
    system, user, turn, first, more, second = messages
    assert system == {"role": "system", "content": "ab"}
    assert user == {"role": "user", "content": "q\nr"}
    assert (turn["content"], turn["reasoning_content"]) == ("wait", "hm")
    assert turn["tool_calls"] == [
        {"id": "u1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    ]
    assert first == {
        "role": "tool",
        "tool_call_id": "u1",
        "name": "add",
        "content": "Error: 2",
    }
    assert more == {"role": "user", "content": "ab"}
    assert second == {"role": "tool", "tool_call_id": "u2", "content": "Error: ab"}


def test_parameters() -> None:
    asked = conversation(temperature=0, top_k=3, stop_sequences=["x"]).parameters
    assert (asked.sampling, asked.stop) == ({"do_sample": False}, ("x",))
    asked = conversation(temperature=0.5, top_p=0.9, top_k=3).parameters
    drawn = {"do_sample": True, "temperature": 0.5, "top_p": pytest.approx(0.9), "top_k": 3}
    assert asked.sampling == drawn
    schema = {"format": {"type": "json_schema", "schema": {"type": "string"}}}
    same = schema["format"]
    for form in (
        {"output_config": schema},
        {"output_format": same},
        {"output_config": {"effort": "low"}, "output_format": same},
        {"output_config": schema, "output_format": same},
    ):
        grammar = conversation(**form).parameters.grammar
        assert grammar == Grammar("json_schema", '{"type":"string"}')
    other = {"type": "json_schema", "schema": {"type": "integer"}}
    with pytest.raises(ValidationError, match="which differs"):
        conversation(output_config=schema, output_format=other)


def test_documents_that_are_texts_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "one"}
    plain = {"type": "document", "source": source, "title": "T", "citations": {"enabled": False}}
    content = {"type": "content", "content": [TEXT_BLOCK, TEXT_BLOCK]}
    parts = {"type": "document", "source": content, "context": "C"}
    made = conversation(messages=[{"role": "user", "content": [plain, parts, TEXT_BLOCK]}])
    assert [message["content"] for message in made.messages] == ["\nT\none\n\nC\naa\na"]
    made = conversation(messages=[{"role": "user", "content": [result(TEXT_BLOCK, plain)]}])
    assert [message["content"] for message in made.messages] == ["a\nT\none\n"]
    with pytest.raises(ValidationError, match="not supported"):
        conversation(messages=[{"role": "user", "content": [plain | {"citations": {}}]}])


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, "add", False),
    ],
)
def test_tool_choice(choice: dict[str, Any] | None, expected: str, is_parallel: bool) -> None:
    asked = conversation(tools=[TOOL], tool_choice=choice)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (expected, is_parallel)


def test_thinking_is_told_to_the_template() -> None:
    assert conversation().template_kwargs == {}
    asked = conversation(thinking={"type": "disabled"})
    assert asked.template_kwargs == {"enable_thinking": False}
    asked = conversation(thinking={"type": "adaptive"})
    assert asked.template_kwargs == {"enable_thinking": True}
    body = CountTokensRequest.model_validate({"model": "m", "messages": BODY["messages"]})
    assert body.to_conversation().parameters.max_new_tokens is None
