"""X-Request-Timeout and --request-timeout: every route ends in time, in its own words."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from text_generation_router.config import RouterConfig
from text_generation_router.errors import DeadlineError
from text_generation_router.request_options import Deadline

from router.tests.chats import TEMPLATE
from router.tests.serving import Server, serve
from router.tests.talk import POST, Talk

Json = dict[str, Any]

MESSAGES: Json = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000}
LONG: Json = {"max_new_tokens": 2000}
TENSOR: Json = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["n"]}
# What a step takes, and what there is for all of them.
STEP_S, DEADLINE_S = 0.02, 0.2
TGI, OPENAI, ANTHROPIC, KSERVE = "tgi", "openai", "anthropic", "kserve"
ROUTES: list[tuple[str, Json, str]] = [
    ("/generate", {"inputs": "n", "parameters": LONG}, TGI),
    ("/", {"inputs": "n", "parameters": LONG}, TGI),
    ("/invocations", {"inputs": "n", "parameters": LONG}, TGI),
    ("/invocations", MESSAGES, TGI),
    ("/vertex", {"instances": [{"inputs": "n", "parameters": LONG}, MESSAGES]}, TGI),
    ("/v2/models/m/infer", {"inputs": [TENSOR, TENSOR], "parameters": LONG}, KSERVE),
    ("/v1/chat/completions", MESSAGES, OPENAI),
    ("/v1/chat/completions", MESSAGES | {"n": 3}, OPENAI),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2000}, OPENAI),
    ("/v1/responses", {"input": "Hi"}, OPENAI),
    ("/v1/messages", {"model": "m", **MESSAGES}, ANTHROPIC),
]
# Asked about their prompts, of which each takes a step.
PROMPTS: list[tuple[str, Json, str]] = [
    ("/v1/embeddings", {"input": ["a", "b"]}, OPENAI),
    ("/score", {"text_1": "a", "text_2": ["b"]}, TGI),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}, OPENAI),
    ("/rerank", {"query": "a", "documents": ["b"]}, TGI),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}, TGI),
]
STREAMS: list[tuple[str, Json, str]] = [
    ("/generate_stream", {"inputs": "n", "parameters": LONG}, TGI),
    ("/v1/chat/completions", MESSAGES | {"stream": True}, OPENAI),
    ("/v1/chat/completions", MESSAGES | {"stream": True, "n": 3}, OPENAI),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2000, "stream": True}, OPENAI),
    ("/v1/responses", {"input": "Hi", "stream": True}, "responses"),
    ("/v1/messages", {"model": "m", **MESSAGES, "stream": True}, ANTHROPIC),
]


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
    await is_quiet(one_server)
    assert one_server.services.metrics.request_failure.value(err="dropped") == 0


async def is_quiet(server: Server) -> None:
    """Waits for the step in flight; after it no block is held."""
    metrics = server.services.metrics
    for _ in range(200):
        if metrics.kv_blocks_used.value == 0:
            break
        await asyncio.sleep(0.01)
    assert metrics.batch_current_size.value == metrics.queue_size.value == 0
    await server.settle()


async def post(
    server: Server, path: str, body: Json, seconds: Any = DEADLINE_S, **headers: str
) -> httpx.Response:
    headers |= {"x-request-timeout": str(seconds)}
    return await server.client.post(path, json=body, headers=headers)


def check_error(form: str, told: Json) -> None:
    """The error object is of that API's form, and says what ended the answer."""
    if form in (TGI, KSERVE):
        sentence = told["error"]
        assert told.get("error_type", "timeout") == "timeout"
        assert ("error_type" in told) == (form == TGI)
    elif form == ANTHROPIC:
        assert told["type"] == "error" and told["error"]["type"] == "timeout_error"
        sentence = told["error"]["message"]
    elif form == "responses":
        assert told["type"] == "response.failed" and told["response"]["status"] == "failed"
        sentence = told["response"]["error"]["message"]
    else:
        assert told["error"]["type"] == told["error"]["code"] == "timeout"
        sentence = told["error"]["message"]
    assert sentence.startswith("The answer has not ended within 0.")
    assert "(X-Request-Timeout)" in sentence


def timeouts(server: Server) -> int:
    return server.services.metrics.request_failure.value(err="timeout")


async def test_answers_that_take_too_long(server: Server) -> None:
    began, before = time.monotonic(), timeouts(server)
    responses = await asyncio.gather(*(post(server, path, body) for path, body, _ in ROUTES))
    assert DEADLINE_S - 0.01 <= time.monotonic() - began < DEADLINE_S + 5
    for response, (_, _, form) in zip(responses, ROUTES, strict=True):
        assert response.status_code == 504, response.text
        check_error(form, response.json())
    assert timeouts(server) - before >= len(ROUTES)


async def test_requests_without_a_first_byte_in_time(server: Server) -> None:
    server.shards.delay_s = 1.0
    cases = PROMPTS + STREAMS
    responses = await asyncio.gather(*(post(server, path, body) for path, body, _ in cases))
    for response, (_, _, form) in zip(responses, cases, strict=True):
        assert response.status_code == 504, response.text
        check_error(OPENAI if form == "responses" else form, response.json())


async def test_a_stream_ends_with_an_error(server: Server) -> None:
    before = timeouts(server)
    responses = await asyncio.gather(*(post(server, path, body, 0.8) for path, body, _ in STREAMS))
    num_sequences = 0
    for response, (_, body, form) in zip(responses, STREAMS, strict=True):
        assert response.status_code == 200, response.text
        events = response.text.removesuffix("\n\n").removesuffix("\n\ndata: [DONE]").split("\n\n")
        assert len(events) > 5, "it has begun"
        check_error(form, json.loads(events[-1].rpartition("data: ")[2]))
        num_sequences += body.get("n", len(body["prompt"]) if "prompt" in body else 1)
    await is_quiet(server)
    assert timeouts(server) - before == num_sequences


async def test_requests_in_time_are_not_changed(server: Server) -> None:
    before = timeouts(server)
    body = {"inputs": "n", "parameters": {"max_new_tokens": 6}}
    for seconds in (30, "30.0", 1e300):
        response = await post(server, "/generate", body, seconds)
        assert response.json() == {"generated_text": "hello "}
    assert timeouts(server) == before


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", "", "1, 2", "1" * 500])
async def test_a_header_that_is_no_time(server: Server, given: str) -> None:
    num_requests = server.services.metrics.request_count.value()
    sentence = "the header X-Request-Timeout must be one number of seconds > 0, such as 2.5. Given"
    for path, body, form in [ROUTES[0], ROUTES[5], ROUTES[6], ROUTES[10]]:
        response = await post(server, path, body, given)
        assert response.status_code == (422 if form == TGI else 400)
        assert sentence in response.text and len(response.text) < 300
    assert server.services.metrics.request_count.value() == num_requests


async def test_two_headers_are_one_too_many(server: Server) -> None:
    path, body, _ = ROUTES[0]
    headers = [("x-request-timeout", "5"), ("X-Request-Timeout", "6")]
    response = await server.client.post(path, json=body, headers=headers)
    assert response.status_code == 422 and "Given: '5, 6'" in response.text


async def test_the_smaller_of_both_counts(tmp_path: Path) -> None:
    path, body, _ = ROUTES[0]
    async with serve(tmp_path, request_timeout=0.2) as server:
        server.shards.delay_s = STEP_S
        response = await server.client.post(path, json=body)
        assert response.status_code == 504 and "0.2 s (--request-timeout)" in response.text
        response = await post(server, path, body, 5)
        assert response.status_code == 504 and "0.2 s (--request-timeout)" in response.text
        response = await post(server, path, body, 0.1)
        assert response.status_code == 504 and "0.1 s (X-Request-Timeout)" in response.text


async def test_a_key_is_looked_at_before_the_header(tmp_path: Path) -> None:
    path, body, _ = ROUTES[0]
    async with serve(tmp_path, api_key=("Secret",)) as server:
        assert (await post(server, path, body, "bad")).status_code == 401
        response = await post(server, path, body, "bad", authorization="Bearer Secret")
        assert response.status_code == 422
        server.shards.delay_s = STEP_S
        response = await post(server, path, body, authorization="Bearer Secret")
        assert response.status_code == 504


async def test_time_counts_while_the_body_comes(server: Server) -> None:
    head = POST + b"X-Request-Timeout: 0.1\r\nContent-Length: 14\r\n\r\n"
    talk = await Talk.to(server, head + b'{"inputs":')
    status, body = await talk.answer()
    assert status == 504
    check_error(TGI, json.loads(body))
    talk.writer.close()


async def test_time_counts_while_the_prompt_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: object) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(server.services.templates, "render", never)
    for path, body, form in [ROUTES[6], ROUTES[10], STREAMS[1], STREAMS[5]]:
        response = await post(server, path, body, 0.1)
        assert response.status_code == 504, response.text
        check_error(form, response.json())


async def test_time_counts_in_the_queue(tmp_path: Path) -> None:
    async with serve(tmp_path, max_batch_size=1) as server:
        server.shards.delay_s = STEP_S
        body = {"inputs": "n", "parameters": {"max_new_tokens": 30}}
        first = asyncio.create_task(server.client.post("/generate", json=body))
        while not server.shards.rows:
            await asyncio.sleep(0)
        waiting = [post(server, path, body, 0.1) for path in ("/generate", "/generate_stream")]
        for response in await asyncio.gather(*waiting):
            assert response.status_code == 504
            check_error(TGI, response.json())
        assert server.services.metrics.queue_size.value == 0
        assert (await first).status_code == 200


async def test_many_at_once_leave_nothing(server: Server) -> None:
    path, body, form = STREAMS[0]
    for response in await asyncio.gather(*(post(server, path, body) for _ in range(100))):
        check_error(form, json.loads(response.text.split("data: ")[-1]))
    await is_quiet(server)
    total = server.services.metrics.batch_max_total_tokens.value
    assert server.services.metrics.kv_blocks_free.value * 16 == total


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
async def test_a_flag_that_is_no_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="`--request-timeout` must be a number of seconds > 0"):
        RouterConfig(tokenizer_name="x", request_timeout=seconds)


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.usefixtures("clock")
async def test_one_timer_at_a_time() -> None:
    deadline = Deadline(0.05, "a test", asyncio.get_running_loop().time())
    ended = []
    async with deadline.bounds():
        with deadline.ends(lambda: ended.append(1)), deadline.ends(lambda: ended.append(2)):
            await asyncio.sleep(0.1)
        assert sorted(ended) == [1, 2], "the task is left alone meanwhile"
    with pytest.raises(DeadlineError):
        async with Deadline(0.05, "a test", asyncio.get_running_loop().time()).bounds() as _:
            await asyncio.sleep(5)
    deadline = Deadline(0.1, "a test", asyncio.get_running_loop().time())
    with pytest.raises(DeadlineError):
        async with deadline.bounds():
            with deadline.ends(lambda: ended.append(3)):
                pass
            await asyncio.sleep(5)
    assert 3 not in ended


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.usefixtures("clock")
async def test_another_timeout_is_not_taken_for_it() -> None:
    deadline = Deadline(5, "a test", asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        async with deadline.bounds():
            raise TimeoutError
