"""X-Request-Timeout and --request-timeout. Integration tests hold every API to them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from text_generation_router.api.tgi import generate
from text_generation_router.api.tgi.generate import generate_answer
from text_generation_router.config import RouterConfig
from text_generation_router.errors import DeadlineError
from text_generation_router.request_options import Deadline

from router.tests.chats import TEMPLATE
from router.tests.serving import Server, serve
from router.tests.talk import POST, Talk

Json = dict[str, Any]

MESSAGES: Json = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000}
LONG: Json = {"inputs": "n", "parameters": {"max_new_tokens": 2000}}
TENSOR: Json = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["n"]}
# What a step takes, and what there is for all of them.
STEP_S, DEADLINE_S = 0.02, 0.2
ROUTES: list[tuple[str, Json]] = [
    ("/generate", LONG),
    ("/v2/models/m/infer", {"inputs": [TENSOR, TENSOR], "parameters": {"max_new_tokens": 2000}}),
    ("/v1/chat/completions", MESSAGES | {"n": 3}),
    ("/v1/messages", {"model": "m", **MESSAGES}),
]
# Asked about their prompts, of which each takes a step.
PROMPTS: list[tuple[str, Json]] = [
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/score", {"text_1": "a", "text_2": ["b"]}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
]
STREAMS: list[tuple[str, Json]] = [
    ("/generate_stream", LONG),
    ("/v1/messages", {"model": "m", **MESSAGES, "stream": True}),
]
ENDED = "The answer has not ended within 0.2 s (X-Request-Timeout)"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with serve(directory, "hello ", reranker=True) as server:
        # The process that renders templates takes its time to start.
        warm = await server.client.post("/v1/chat/completions", json=MESSAGES | {"max_tokens": 1})
        assert warm.status_code == 200
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def server(one_server: Server) -> AsyncIterator[Server]:
    """The server of the module, on which nothing runs before and after the test."""
    one_server.shards.delay_s = STEP_S
    yield one_server
    await one_server.settle()
    assert one_server.services.metrics.request_failure.value(err="dropped") == 0


async def post(
    server: Server, path: str, body: Json, seconds: Any = DEADLINE_S, **headers: str
) -> httpx.Response:
    headers |= {"x-request-timeout": str(seconds)}
    return await server.client.post(path, json=body, headers=headers)


async def check_all_end(server: Server, cases: list[tuple[str, Json]]) -> None:
    for response in await asyncio.gather(*(post(server, path, body) for path, body in cases)):
        assert response.status_code == 504, response.text
        assert ENDED in response.text


async def test_requests_without_a_first_byte_in_time(server: Server) -> None:
    server.shards.delay_s = 1.0
    await check_all_end(server, PROMPTS + STREAMS)


async def test_requests_in_time_are_not_changed(server: Server) -> None:
    body = {"inputs": "n", "parameters": {"max_new_tokens": 6}}
    for seconds in (30, "30.0", 1e300):
        response = await post(server, "/generate", body, seconds)
        assert response.json() == {"generated_text": "hello "}


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", "", "1, 2", "1" * 500])
async def test_a_header_that_is_no_time(server: Server, given: str) -> None:
    num_requests = server.services.metrics.request_count.value()
    sentence = "the header X-Request-Timeout must be one number of seconds > 0, such as 2.5. Given"
    for path, body in ROUTES:
        response = await post(server, path, body, given)
        assert response.status_code == (422 if path == "/generate" else 400)
        assert sentence in response.text and len(response.text) < 300
    assert server.services.metrics.request_count.value() == num_requests


async def test_two_headers_are_one_too_many(server: Server) -> None:
    headers = [("x-request-timeout", "5"), ("X-Request-Timeout", "6")]
    response = await server.client.post("/generate", json=LONG, headers=headers)
    assert response.status_code == 422 and "Given: '5, 6'" in response.text


async def test_the_smaller_of_both_counts(tmp_path: Path) -> None:
    async with serve(tmp_path, request_timeout=0.2) as server:
        server.shards.delay_s = STEP_S
        for seconds, told in ((5, "0.2 s (--request-timeout)"), (0.1, "0.1 s (X-Request-Timeout)")):
            response = await post(server, "/generate", LONG, seconds)
            assert response.status_code == 504 and told in response.text
        response = await server.client.post("/generate", json=LONG)
        assert response.status_code == 504 and "0.2 s (--request-timeout)" in response.text


async def test_a_key_is_looked_at_before_the_header(tmp_path: Path) -> None:
    async with serve(tmp_path, api_key=("Secret",)) as server:
        assert (await post(server, "/generate", LONG, "bad")).status_code == 401
        response = await post(server, "/generate", LONG, "bad", authorization="Bearer Secret")
        assert response.status_code == 422


async def test_time_counts_while_the_body_comes(server: Server) -> None:
    head = POST + b"X-Request-Timeout: 0.2\r\nContent-Length: 14\r\n\r\n"
    talk = await Talk.to(server, head + b'{"inputs":')
    status, body = await talk.answer()
    assert status == 504 and ENDED.encode() in body
    talk.writer.close()


async def test_an_answer_that_is_ready_when_the_time_ends_is_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step does not wait for anything. It was counted as a success by then."""

    def render_slowly(*arguments: Any) -> Json:
        time.sleep(DEADLINE_S)
        return generate_answer(*arguments)

    monkeypatch.setattr(generate, "generate_answer", render_slowly)
    server.shards.delay_s = 0
    response = await post(server, "/generate", {"inputs": "n", "parameters": {"max_new_tokens": 6}})
    assert response.json() == {"generated_text": "hello "}


async def test_time_counts_while_the_prompt_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: object) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(server.services.templates, "render", never)
    await check_all_end(server, [ROUTES[2], STREAMS[1]])


async def test_time_counts_in_the_queue(tmp_path: Path) -> None:
    async with serve(tmp_path, max_batch_size=1) as server:
        server.shards.delay_s = STEP_S
        body = {"inputs": "n", "parameters": {"max_new_tokens": 30}}
        first = asyncio.create_task(server.client.post("/generate", json=body))
        while not server.shards.rows:
            await asyncio.sleep(0)
        await check_all_end(server, [("/generate", body), ("/generate_stream", body)])
        assert server.services.metrics.queue_size.value == 0
        assert (await first).status_code == 200


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
async def test_a_flag_that_is_no_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="`--request-timeout` must be a number above 0"):
        RouterConfig(tokenizer_name="x", request_timeout=seconds)


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.usefixtures("clock")
async def test_another_timeout_is_not_taken_for_it() -> None:
    with pytest.raises(DeadlineError):
        async with Deadline(0.1, "a test", asyncio.get_running_loop().time()).bounds():
            await asyncio.sleep(5)
    with pytest.raises(TimeoutError):
        async with Deadline(5, "a test", asyncio.get_running_loop().time()).bounds():
            raise TimeoutError("of another cause")
