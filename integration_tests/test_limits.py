"""Deadlines, waiting and priorities on a real server, with the embedded model."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from integration_tests.server import LauncherHandle, running, stream_events

Json = dict[str, Any]

# How long an answer may take, and a request wait for its turn.
# The router counts from the beginning of the turn of its event loop in which a request came.
EARLY_S = 0.1
DEADLINE_S, WAIT_S = 0.5, 0.4
# And how much later it may arrive while other tests keep the cores busy.
LATE_S = 5.0
ONE_ROW = ("--max-batch-size", "1")
# Many tokens, none of which ends the text.
LONG: Json = {"max_new_tokens": 1500, "ignore_eos_token": True}
TENSOR: Json = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["My name is"]}
MESSAGES: Json = {"messages": [{"role": "user", "content": "What is deep learning?"}]}
CHAT: Json = MESSAGES | {"max_tokens": 1500, "ignore_eos": True}
# Dialects without such a field: the array needs at least 601 tokens.
NUMBERS: Json = {
    "type": "json_schema",
    "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 300},
}
RESPONSE: Json = {
    "input": "What is deep learning?",
    "text": {"format": NUMBERS | {"name": "numbers"}},
}
MESSAGE: Json = {
    "model": "m",
    **MESSAGES,
    "max_tokens": 1500,
    "output_config": {"format": NUMBERS},
}
STREAMS: list[tuple[str, Json]] = [
    ("/generate_stream", {"inputs": "My name is", "parameters": LONG}),
    ("/", {"inputs": "My name is", "parameters": LONG, "stream": True}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}),
    ("/v1/responses", RESPONSE | {"stream": True}),
    ("/v1/messages", MESSAGE | {"stream": True}),
    ("/invocations", CHAT | {"stream": True}),
]
WHOLE: list[tuple[str, Json]] = [
    ("/generate", {"inputs": "My name is", "parameters": LONG}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}),
    ("/v2/models/m/infer", {"inputs": [TENSOR], "parameters": LONG}),
    ("/invocations", {"inputs": "My name is", "parameters": LONG}),
    ("/vertex", {"instances": [{"inputs": "My name is", "parameters": LONG}]}),
]
TIMEOUT_WORDS = ('"timeout"', '"timeout_error"', '"response.failed"')


def compile_all(handle: LauncherHandle) -> None:
    """So that no measured time has the compilation of the template or of the grammar in it."""
    assert handle.client.post("/v1/responses", json=RESPONSE).status_code == 200
    handle.assert_idle()


@pytest.fixture
def roomy(embedded: LauncherHandle) -> LauncherHandle:
    compile_all(embedded)
    return embedded


@pytest.fixture(scope="module")
def narrow() -> Iterator[LauncherHandle]:
    with running(
        None, *ONE_ROW, "--max-queue-wait", str(WAIT_S), "--step-deadline", "60"
    ) as handle:
        compile_all(handle)
        yield handle


@asynccontextmanager
async def busy(server: LauncherHandle, num: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client, while long streams run."""
    async with server.async_client() as client:

        async def read(number: int) -> None:
            async for _ in stream_events(client, f"My name is {number}", **LONG):
                started[number].set()

        started = [asyncio.Event() for _ in range(num)]
        readers = [asyncio.create_task(read(number)) for number in range(num)]
        try:
            await asyncio.gather(*(event.wait() for event in started))
            yield client
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def post(
    client: httpx.AsyncClient, path: str, body: Json, **headers: Any
) -> tuple[httpx.Response, float]:
    """The answer, and how long it took."""
    began = time.monotonic()
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    response = await client.post(path, json=body, headers=named)
    return response, time.monotonic() - began


async def test_a_stream_of_each_dialect_ends_in_time(roomy: LauncherHandle) -> None:
    """Many other streams run, which this does not end."""
    async with busy(roomy, 96) as client:
        for path, body in STREAMS:
            response, took_s = await post(client, path, body, x_request_timeout=DEADLINE_S)
            assert response.status_code in (200, 504), response.text
            assert DEADLINE_S - EARLY_S <= took_s < DEADLINE_S + LATE_S, (path, took_s)
            last = response.text.removesuffix("data: [DONE]\n\n").strip().rpartition("\n\n")[2]
            assert "The answer has not ended within 0.5 s (X-Request-Timeout)" in last, path
            assert any(words in last for words in TIMEOUT_WORDS), last
        assert roomy.metrics()["tgi_batch_current_size"] >= 90


async def test_a_whole_answer_is_a_504(roomy: LauncherHandle) -> None:
    before = roomy.metrics()['tgi_request_failure{err="timeout"}']
    async with roomy.async_client() as client:
        asked = [post(client, path, body, x_request_timeout=DEADLINE_S) for path, body in WHOLE]
        for response, took_s in await asyncio.gather(*asked):
            assert response.status_code == 504, response.text
            assert DEADLINE_S - EARLY_S <= took_s < DEADLINE_S + LATE_S
            assert response.json()["error"]
    roomy.assert_idle()
    assert roomy.metrics()['tgi_request_failure{err="timeout"}'] == before + len(WHOLE)


async def test_many_timeouts_at_once_leave_all_blocks_free(roomy: LauncherHandle) -> None:
    free = roomy.metrics()["tgi_kv_blocks_free"]
    async with roomy.async_client() as client:
        path, body = STREAMS[0]
        asked = [
            post(client, path, body | {"inputs": f"Name {number}"}, x_request_timeout=0.3)
            for number in range(300)
        ]
        for response, _ in await asyncio.gather(*asked):
            assert "(X-Request-Timeout)" in response.text
    roomy.assert_idle()
    assert roomy.metrics()["tgi_kv_blocks_free"] == free
    assert len(roomy.generate("My name is", max_new_tokens=5)["details"]["tokens"]) == 5


async def test_a_request_without_a_turn_in_time_is_told_when_to_come_again(
    narrow: LauncherHandle,
) -> None:
    before = narrow.metrics()['tgi_request_failure{err="queue_wait"}']
    refused = [(path, body) for path, body in STREAMS + WHOLE if path != "/vertex"]
    shard = narrow.child("text-generation-server")
    async with busy(narrow, 1) as client:
        # So that the one that runs does not end meanwhile.
        shard.suspend()
        try:
            answers = await asyncio.gather(*(post(client, path, body) for path, body in refused))
        finally:
            shard.resume()
        for response, took_s in answers:
            assert response.status_code == 503, response.text
            assert WAIT_S <= took_s < WAIT_S + LATE_S
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert "(--max-queue-wait)" in json.dumps(response.json())
    narrow.assert_idle()
    after = narrow.metrics()['tgi_request_failure{err="queue_wait"}']
    assert after == before + len(refused)


async def test_a_deadline_holds_while_the_shard_stands_still(roomy: LauncherHandle) -> None:
    shard = roomy.child("text-generation-server")
    async with roomy.async_client() as client:
        shard.suspend()
        try:
            asked = [post(client, path, body, x_request_timeout=DEADLINE_S) for path, body in WHOLE]
            for response, took_s in await asyncio.gather(*asked):
                assert response.status_code == 504, response.text
                assert took_s < DEADLINE_S + LATE_S
        finally:
            shard.resume()
    roomy.assert_idle()
