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
MESSAGES = [{"role": "user", "content": WORDS}]
LENGTH = len(f"<user>{WORDS}<assistant>")
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve_chat(tmp_path, "Hi") as server:
        yield server


async def usage_of(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """The usage, which a stream tells in the last event that has one."""
    response = await server.client.post(path, json={"model": "tgi", **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return dict(response.json()["usage"])
    events = [part.partition("data: ")[2] for part in response.text.split("\n\n")]
    told = [orjson.loads(event) for event in events if "usage" in event]
    return dict((told[-1].get("response") or told[-1])["usage"])


def whole_blocks(num_tokens: int) -> int:
    """What another request finds of a prompt; its last token is computed in any case."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("more", [{}, STREAM, {"n": 3}])
async def test_chat(server: Server, more: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, **more}
    told = [await usage_of(server, "/v1/chat/completions", **body) for _ in range(2)]
    assert [usage["prompt_tokens"] for usage in told] == [LENGTH, LENGTH]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in told]
    assert cached == [0, whole_blocks(LENGTH)] and cached[1] > 0


@pytest.mark.parametrize("more", [{}, STREAM])
async def test_completions_add_up_their_prompts(server: Server, more: dict[str, Any]) -> None:
    first = await usage_of(server, "/v1/completions", prompt=WORDS, max_tokens=2)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    prompts = [WORDS, WORDS + WORDS, "another"]
    usage = await usage_of(server, "/v1/completions", prompt=prompts, max_tokens=2, n=2, **more)
    assert usage["prompt_tokens"] == sum(len(prompt) + 1 for prompt in prompts)  # and the <s>
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * whole_blocks(len(WORDS) + 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(server: Server, stream: bool) -> None:
    told = [await usage_of(server, "/v1/responses", input=WORDS, stream=stream) for _ in range(2)]
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in told]
    assert cached == [0, whole_blocks(told[0]["input_tokens"])] and cached[1] > 0


async def test_messages_tell_apart_what_was_read_and_what_computed(server: Server) -> None:
    """As Anthropic does: clients add the two up."""
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
    told = [
        await usage_of(server, "/v1/messages", **body, stream=stream) for stream in (False, True)
    ]
    counts = [(usage["input_tokens"], usage["cache_read_input_tokens"]) for usage in told]
    assert counts == [(LENGTH, 0), (LENGTH - whole_blocks(LENGTH), whole_blocks(LENGTH))]
    body = {"model": "tgi", "messages": MESSAGES}
    counted = await server.client.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": LENGTH}
