"""Every API that counts tokens says how many of the prompt were cached, streamed or not."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.tests.chats import serve_chat
from router.tests.serving import Server

BLOCK_SIZE = 16
WORDS = "the cat sat on the mat and "
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve_chat(tmp_path, "Hi") as server:
        yield server


async def openai_usage(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage, which a stream tells in its last event."""
    response = await server.client.post(path, json={"model": "tgi", **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return dict(response.json()["usage"])
    *_, last, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    return dict(orjson.loads(last.removeprefix("data: "))["usage"])


def whole_blocks(num_tokens: int) -> int:
    """What another request finds of a prompt; its last token is computed in any case."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("more", [{}, STREAM, {"n": 3}])
async def test_chat(server: Server, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2, **more}
    told = [await openai_usage(server, "/v1/chat/completions", body) for _ in range(2)]
    num = len(f"<user>{WORDS}<assistant>")
    assert [usage["prompt_tokens"] for usage in told] == [num, num]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in told]
    assert cached == [0, whole_blocks(num)] and cached[1] > 0


@pytest.mark.parametrize("more", [{}, STREAM])
async def test_completions_add_up_their_prompts(server: Server, more: dict[str, Any]) -> None:
    first = await openai_usage(server, "/v1/completions", {"prompt": WORDS, "max_tokens": 2})
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    prompts = [WORDS, WORDS + WORDS, "another"]
    body = {"prompt": prompts, "max_tokens": 2, "n": 2, **more}
    usage = await openai_usage(server, "/v1/completions", body)
    assert usage["prompt_tokens"] == sum(len(prompt) + 1 for prompt in prompts)  # and the <s>
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * whole_blocks(len(WORDS) + 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(server: Server, stream: bool) -> None:
    body = {"model": "tgi", "input": WORDS, "stream": stream}
    cached = []
    for _ in range(2):
        response = await server.client.post("/v1/responses", json=body)
        data = response.text.rstrip().rpartition("data: ")[2] if stream else response.text
        answer = orjson.loads(data)
        usage = (answer["response"] if stream else answer)["usage"]
        cached.append(usage["input_tokens_details"]["cached_tokens"])
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert cached == [0, whole_blocks(usage["input_tokens"])] and cached[1] > 0


async def test_messages_tell_apart_what_was_read_and_what_computed(server: Server) -> None:
    """As Anthropic does: clients add the two up."""
    message = {"role": "user", "content": WORDS}
    body: dict[str, Any] = {"model": "tgi", "messages": [message], "max_tokens": 2}
    num = len(f"<user>{WORDS}<assistant>")
    told = []
    for stream in (False, True):
        response = await server.client.post("/v1/messages", json=body | {"stream": stream})
        if not stream:
            told.append(response.json()["usage"])
            continue
        events = [
            orjson.loads(part.partition("data: ")[2]) for part in response.text.split("\n\n")[:-1]
        ]
        told.append(events[0]["message"]["usage"] | {"output_tokens": 2})
        assert events[-2]["usage"] == told[-1]
    counts = [(usage["input_tokens"], usage["cache_read_input_tokens"]) for usage in told]
    assert counts == [(num, 0), (num - whole_blocks(num), whole_blocks(num))]
    counted = await server.client.post(
        "/v1/messages/count_tokens", json={"model": "tgi", "messages": [message]}
    )
    assert counted.json() == {"input_tokens": num}
