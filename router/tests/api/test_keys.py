"""API keys as clients send them: what they open, what they share, and how much each may do."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from text_generation_router.api.routes import JsonRoute
from text_generation_router.app import create_app
from text_generation_router.edge.keys import NEEDS_KEY

from router.tests.chats import serve_chat
from router.tests.serving import Server, serve
from router.tests.talk import said

WORDS = "the cat sat on the mat and "
MESSAGES = [{"role": "user", "content": WORDS}]
SHORT = {"max_new_tokens": 2}
GENERATE: dict[str, Any] = {"inputs": WORDS, "parameters": SHORT}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": WORDS, "max_tokens": 2}
ANTHROPIC: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "max_tokens": 2}
RESPONSE: dict[str, Any] = {"input": WORDS, "max_output_tokens": 16}
INFER = "/v2/models/m/versions/1/infer"
TENSOR = {"name": "x", "shape": [1], "datatype": "UINT8", "data": list(WORDS.encode())}
OPEN_INFER = "/v2/models/m/infer"
TEXTS = {"name": "x", "shape": [1], "datatype": "BYTES", "data": [WORDS]}
KSERVE: dict[str, Any] = {
    **{"id": "1", "inputs": [TENSOR], "outputs": [{"name": "y"}]},
    "parameters": SHORT,
}
RERANKING = ("/v1/rerank", "/v2/rerank", "/rerank")
STREAM = {"stream": True}
# Every way to have something generated.
ASKING = [
    ("/generate", GENERATE),
    ("/generate_stream", GENERATE),
    ("/", GENERATE),
    ("/", GENERATE | STREAM),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | STREAM),
    ("/v1/completions", COMPLETION | {"prompt": [WORDS, "b"], "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | STREAM),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", RESPONSE | STREAM),
    ("/v1/messages", ANTHROPIC),
    ("/v1/messages", ANTHROPIC | STREAM),
    (INFER, KSERVE),
    (OPEN_INFER, {"inputs": [TEXTS], "parameters": SHORT}),
    ("/v1/embeddings", {"input": WORDS}),
    ("/v1/embeddings", {"input": [WORDS, WORDS + "b"]}),
    ("/v1/score", {"text_1": WORDS, "text_2": WORDS}),
    ("/score", {"text_1": WORDS, "text_2": WORDS}),
    *((path, {"query": WORDS, "documents": [WORDS]}) for path in RERANKING),
    ("/vertex", {"instances": [GENERATE]}),
    ("/vertex", {"instances": [CHAT]}),
    ("/predict", {"instances": [GENERATE]}),
    ("/invocations", GENERATE),
    ("/invocations", CHAT),
    ("/invocations", COMPLETION | STREAM),
]
# Their errors are not in TGI's form.
NOT_TGIS = ("/v1/", OPEN_INFER)
NOT_GENERATING = {"/tokenize", "/chat_tokenize", "/v1/messages/count_tokens"}


# One server serves the whole module: each case has keys of its own, which share nothing.
CASES = [(f"key{place}", path, body) for place, (path, body) in enumerate(ASKING)]
KEYS = tuple(f"{key}{end}" for key, _, _ in CASES for end in "abc")
pytestmark = pytest.mark.asyncio(loop_scope="module")


def salted(body: dict[str, Any], salt: Any) -> dict[str, Any]:
    """The same with a salt in its place."""
    if "instances" in body:
        return {"instances": [salted(one, salt) for one in body["instances"]]}
    if "parameters" in body:
        return body | {"parameters": body["parameters"] | {"cache_salt": salt}}
    return body | {"cache_salt": salt}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def cached_tokens(server: Server, path: str, body: dict[str, Any], key: str = "a") -> int:
    """How many tokens of the prompts were found in the cache."""
    hits = server.services.metrics.prefix_cache_hit_tokens
    before = hits.value()
    response = await server.client.post(path, json=body, headers=bearer(key))
    assert response.status_code == 200, response.text
    assert '"error"' not in response.text.replace('"error":null', ""), response.text
    return hits.value() - before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serve_chat(
        tmp_path_factory.mktemp("keys"),
        "Hi",
        api_key=("a", *KEYS),
        aip_predict_route="/predict",
        aip_health_route="/live",
        reranker=True,
    ) as server:
        yield server


async def test_every_route_that_generates_is_tried(server: Server) -> None:
    app = create_app(server.services.config, server.services)
    routes = {
        route.path: route
        for router in app.state.routers
        for route in router.routes
        if "POST" in route.methods
    }
    named = {
        INFER: "/v2/models/{model_name:model}/versions/{model_version}/infer",
        OPEN_INFER: "/v2/models/{model_name:model}/infer",
    }
    assert routes.keys() == {named.get(path, path) for path, _ in ASKING} | NOT_GENERATING
    for route in routes.values():
        assert isinstance(route, JsonRoute)
        assert route.dependencies == NEEDS_KEY
    assert (await server.client.get("/live")).status_code == 200


@pytest.mark.parametrize(("key", "path", "body"), CASES)
async def test_keys_share_no_cached_prefix(
    server: Server, key: str, path: str, body: dict[str, Any]
) -> None:
    alone = await cached_tokens(server, path, body, f"{key}a")  # the sequences of one prompt
    again = await cached_tokens(server, path, body, f"{key}a")
    assert again > alone
    assert await cached_tokens(server, path, body, f"{key}b") == alone
    assert await cached_tokens(server, path, body, f"{key}b") == again


@pytest.mark.parametrize(("key", "path", "body"), CASES)
async def test_salts_share_no_cached_prefix(
    server: Server, key: str, path: str, body: dict[str, Any]
) -> None:
    key = f"{key}c"
    alone = await cached_tokens(server, path, salted(body, "x"), key)
    again = await cached_tokens(server, path, salted(body, "x"), key)
    assert again > alone
    assert await cached_tokens(server, path, salted(body, "y"), key) == alone
    assert await cached_tokens(server, path, body, key) == alone
    assert await cached_tokens(server, path, salted(body, None), key) == again
    for salt in ("", "x" * 257, 7, ["x"]):
        response = await server.client.post(path, json=salted(body, salt), headers=bearer("a"))
        assert response.status_code == (400 if path.startswith(NOT_TGIS) else 422)
        assert "cache_salt" in response.text


@pytest.mark.parametrize("api_key", [(), ("a",)])
async def test_with_one_key_or_none_all_share(tmp_path: Path, api_key: tuple[str, ...]) -> None:
    async with serve(tmp_path, api_key=api_key) as server:
        assert await cached_tokens(server, "/generate", GENERATE) == 0
        assert await cached_tokens(server, "/generate", GENERATE) > 0
        assert await cached_tokens(server, "/generate", salted(GENERATE, "x")) == 0


ODD_HEADERS: list[tuple[list[tuple[bytes, bytes]], int]] = [
    ([(b"authorization", b"Bearer a")], 200),
    ([(b"authorization", b"BEARER   a ")], 200),
    ([(b"x-api-key", b" a ")], 200),
    ([(b"authorization", b"Basic eA=="), (b"x-api-key", b"a")], 200),
    ([(b"authorization", b"Bearer")], 401),
    ([(b"authorization", b"Bearer ")], 401),
    ([(b"authorization", b"")], 401),
    ([(b"authorization", b"a")], 401),
    ([(b"authorization", b"Bearer \xff\xfe\x80")], 401),
    ([(b"authorization", "Bearer \u0430".encode())], 401),
    ([(b"authorization", b"Bearer a\xa0")], 401),
    ([(b"authorization", b"\xa0Bearer a")], 401),
    ([(b"authorization", b"Bearer " + b"a" * 50_000)], 401),
    ([(b"x-api-key", b"a" * 50_000)], 401),
    # Who sends two might be two.
    ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer a")], 401),
    ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer z")], 401),
    ([(b"authorization", b"Bearer z"), (b"authorization", b"Bearer a")], 401),
    ([(b"authorization", b"x"), (b"authorization", b"y"), (b"x-api-key", b"a")], 401),
    ([(b"x-api-key", b"a"), (b"x-api-key", b"a")], 401),
    ([(b"authorization", b"Bearer z"), (b"x-api-key", b"a")], 401),
]


async def test_odd_headers(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    unauthorized = server.services.metrics.request_unauthorized
    for headers, status in ODD_HEADERS:
        before = unauthorized.value()
        for path, form in ((b"/info", b""), (b"/v1/models", b"invalid_api_key")):
            lines = [b"GET %b HTTP/1.1" % path, b"host: a", b"connection: close"]
            lines += [b"%b: %b" % pair for pair in headers]
            answer = await said(server, b"\r\n".join(lines) + b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 %d " % status), (headers, answer)
            if status == 401:
                assert b"\r\nwww-authenticate: Bearer\r\n" in answer and form in answer
        assert unauthorized.value() - before == (0 if status == 200 else 2)
    assert not [record for record in caplog.records if "router" in record.name]


async def hold(server: Server, key: str) -> "asyncio.Task[Any]":
    """A generation that goes on until it is cancelled."""
    server.shards.delay_s = 0.002
    before = server.services.infer.free_permits
    body = {"inputs": "x", "parameters": {"max_new_tokens": 4000}}
    task = asyncio.create_task(
        server.client.post("/generate", json=body, headers=bearer(key), timeout=60)
    )
    while server.services.infer.free_permits == before:
        await asyncio.sleep(0.001)
    return task


async def test_running_requests_of_each_key(tmp_path: Path) -> None:
    async with serve_chat(
        tmp_path,
        "Hi",
        api_key=("a", "b"),
        aip_predict_route="/predict",
        max_concurrent_requests_per_key=4,
        reranker=True,
    ) as server:
        server.shards.script = [1]
        held = [await hold(server, "a") for _ in range(4)]
        for path, body in ASKING:
            response = await server.client.post(path, json=body, headers=bearer("a"))
            assert "(--max-concurrent-requests-per-key)" in response.text, path
            if response.status_code != 200:  # or an event
                assert response.status_code == 429
                assert path.startswith(NOT_TGIS) or response.json()["error_type"] == "overloaded"
            response = await server.client.post(path, json=body, headers=bearer("b"))
            assert response.status_code == 200 and "per-key" not in response.text, path
        assert server.services.metrics.request_key_limit.value(reason="requests") >= len(ASKING)
        assert not any(task.done() for task in held)
        server.shards.script = [257]
        await asyncio.gather(*held)


async def test_more_sequences_than_a_key_may_have(tmp_path: Path) -> None:
    async with serve(tmp_path, api_key=("a",), max_concurrent_requests_per_key=2) as server:
        for more in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
            body = COMPLETION | more
            response = await server.client.post("/v1/completions", json=body, headers=bearer("a"))
            assert response.status_code == 400
            assert "at most 2 (--max-concurrent-requests-per-key)" in response.text
        tensor = {"name": "a", "shape": [3], "datatype": "BYTES", "data": ["a", "b", "c"]}
        many: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v2/models/m/infer", {"inputs": [tensor]}),
            ("/vertex", {"instances": [{"inputs": "x"}] * 3}),
        )
        for path, body in many:
            response = await server.client.post(path, json=body, headers=bearer("a"))
            assert response.status_code in (400, 422)
            assert "has 3 sequences; an API key may have at most 2" in response.text
        body = {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True, **SHORT}}
        response = await server.client.post("/generate", json=body, headers=bearer("a"))
        assert response.status_code == 200
        assert server.services.metrics.request_key_limit.value(reason="requests") == 0


async def test_tokens_of_a_minute(tmp_path: Path) -> None:
    """Those of the prompt and those that are generated, whole or streamed."""
    async with serve(tmp_path, api_key=("a", "b"), max_tokens_per_minute_per_key=100) as server:

        async def status(path: str, num: int, key: str) -> str:
            body = {"inputs": "x" * 9, "parameters": {"max_new_tokens": num}}
            response = await server.client.post(path, json=body, headers=bearer(key))
            return response.text if "per-key" in response.text else ""

        for key, path in (("a", "/generate"), ("b", "/generate_stream")):
            assert not await status(path, 80, key)  # and 10 of the prompt
            assert not await status(path, 90, key)  # into debt, by 90
            assert "try again in 5" in await status(path, 1, key)
        assert server.services.metrics.request_key_limit.value(reason="tokens") == 2


async def test_tokens_that_nobody_reads_count(tmp_path: Path) -> None:
    async with serve(tmp_path, api_key=("a", "b"), max_tokens_per_minute_per_key=100) as server:
        server.shards.delay_s = 0.001
        body = {"inputs": "x", "parameters": {"max_new_tokens": 300}}
        stream = server.client.stream("POST", "/generate_stream", json=body, headers=bearer("a"))
        async with stream as response:
            lines = response.aiter_lines()
            for _ in range(2 * 150):
                await anext(lines)
        await server.settle()
        response = await server.client.post("/generate", json=body, headers=bearer("a"))
        assert response.status_code == 429
