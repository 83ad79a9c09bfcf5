"""A full queue, a server that stops and invalid requests: a status before the first byte, a
Retry-After, and no paths or other clients' texts in errors."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import text_generation_launcher

from integration_tests.hostile.contained import contained
from integration_tests.server import LauncherHandle, wait_until

MARKER = "xyzzy7Marker"
PERMITS = 4
LONG = {"inputs": "What is a list?", "parameters": {"max_new_tokens": 1500}}
LONG["parameters"]["ignore_eos_token"] = True  # type: ignore[index]
MESSAGES = [{"role": "user", "content": "Hi"}]
INFER = "/v2/models/m/versions/1/infer"
TENSOR = {"name": "a", "shape": [1, 1], "datatype": "UINT8", "data": [65]}
# Every route that generates, in all its forms.
FEW = {"max_new_tokens": 2}
GENERATING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"inputs": "a", "parameters": FEW}),
    ("/generate_stream", {"inputs": "a", "parameters": FEW}),
    ("/", {"inputs": "a", "parameters": FEW}),
    ("/", {"inputs": "a", "parameters": FEW, "stream": True}),
    ("/invocations", {"inputs": "a", "parameters": FEW, "stream": True}),
    ("/invocations", {"messages": MESSAGES, "max_tokens": 2, "stream": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 16, "stream": True}),
    ("/v1/messages", {"model": "tgi", "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/messages", {"model": "tgi", "messages": MESSAGES, "max_tokens": 4, "stream": True}),
    (
        "/vertex",
        {
            "instances": [
                {"inputs": "a", "parameters": FEW},
                {"messages": MESSAGES, "max_tokens": 2},
            ]
        },
    ),
    (INFER, {"id": "1", "inputs": [TENSOR], "outputs": [{"name": "a"}], "parameters": FEW}),
)


@pytest.fixture(scope="module")
def small_house() -> Iterator[LauncherHandle]:
    with contained(None, "--max-concurrent-requests", str(PERMITS)) as handle:
        yield handle


def ask(handle: LauncherHandle, path: str, body: Any) -> httpx.Response:
    """The answer; one that is not a stream has a status first."""
    return handle.client.post(path, json=body)


def assert_comes_again(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    assert 1 <= int(response.headers["retry-after"]) <= 90
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]
    assert_no_inner_words(response)


def assert_no_inner_words(response: httpx.Response) -> None:
    told = response.text
    for inner in ("/tmp/", "unix:", "site-packages", ".py", "Traceback", "shard-0", ".json"):
        assert inner not in told, told


@asynccontextmanager
async def full(handle: LauncherHandle) -> AsyncIterator[list[Any]]:
    """All permits are taken in the block, by running streams."""
    async with handle.async_client() as client:
        requests = [client.build_request("POST", "/generate_stream", json=LONG)] * PERMITS
        streams = [await client.send(request, stream=True) for request in requests]
        try:
            lines = [stream.aiter_lines() for stream in streams]
            for of_one in lines:
                await anext(of_one)
            yield lines
        finally:
            for stream in streams:
                await stream.aclose()


async def refused(handle: LauncherHandle, status: int) -> None:
    for path, body in GENERATING:
        response = await asyncio.to_thread(ask, handle, path, body)
        assert_comes_again(response, status)


def test_a_full_house_is_a_status_on_every_route(small_house: LauncherHandle) -> None:
    async def attack() -> None:
        async with full(small_house) as lines:
            await refused(small_house, 429)
            wrong = {"inputs": "a", "parameters": {"best_of": 2}}
            told = await asyncio.to_thread(ask, small_house, "/generate_stream", wrong)
            assert told.status_code == 200 and "Input validation error" in told.text
            # The other streams were not affected.
            for of_one in lines:
                assert "error" not in await anext(of_one)

    asyncio.run(attack())
    small_house.assert_idle()
    for path, body in GENERATING:
        assert ask(small_house, path, body).status_code == 200, path


def test_many_clients_at_once_lose_nothing(small_house: LauncherHandle) -> None:
    """A refused request gets its error immediately; an admitted request is answered."""

    async def one(client: httpx.AsyncClient, place: int) -> int:
        path, body = GENERATING[place % len(GENERATING)]
        response = await client.post(path, json=body)
        if response.status_code != 200:
            assert_comes_again(response, 429)
        return response.status_code

    async def attack() -> list[int]:
        async with small_house.async_client() as client:
            return await asyncio.gather(*(one(client, place) for place in range(200)))

    statuses = asyncio.run(attack())
    assert {200, 429} == set(statuses)
    small_house.assert_idle()


def test_a_server_that_stops_says_so() -> None:
    async def attack(handle: LauncherHandle) -> None:
        async with full(handle) as lines:
            handle.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(
                wait_until, lambda: "running requests" in handle.log, 10, "it is to stop"
            )
            await refused(handle, 503)
            for path in ("/health", "/info", "/v1/models", "/v2/health/ready"):
                response = await asyncio.to_thread(handle.client.get, path)
                assert_comes_again(response, 503)
            assert "error" not in await anext(lines[0])
        await asyncio.to_thread(handle.wait_for_exit)

    with contained(None, "--max-concurrent-requests", str(PERMITS)) as handle:
        asyncio.run(attack(handle))


def test_shards_that_are_gone_are_not_described() -> None:
    """Neither their socket nor their error is in the answer."""
    statuses: list[int] = []

    async def ask_all(handle: LauncherHandle) -> None:
        async with handle.async_client() as client:
            stream = client.stream("POST", "/generate_stream", json=LONG)
            async with stream as response:
                lines = response.aiter_lines()
                await anext(lines)
                handle.child("text-generation-server").kill()
                last = [line async for line in lines if "error" in line]
            assert len(last) == 1 and "during generation" in last[0]
            assert not any(word in last[0] for word in ("unix", "/tmp", "recvmsg", "shard-0"))
            for path, body in GENERATING:
                try:
                    answer = await client.post(path, json=body)
                except httpx.TransportError:
                    return  # the router has ended
                statuses.append(answer.status_code)
                assert_no_inner_words(answer)

    server = contained(None, "--no-restart")
    with pytest.raises(AssertionError, match="ended with code"), server as handle:
        asyncio.run(ask_all(handle))
        handle.wait_for_exit(30)
    assert set(statuses) <= {424, 500, 503, 200}


def marked(value: Any) -> Iterator[Any]:
    """Values with the marker in place of each part in turn, and as an extra key of each object."""
    yield MARKER
    yield {MARKER: MARKER}
    if isinstance(value, dict):
        yield {**value, MARKER: MARKER}
        for name, part in value.items():
            for other in marked(part):
                yield {**value, name: other}
    elif isinstance(value, list):
        for place, part in enumerate(value):
            for other in marked(part):
                yield [*value[:place], other, *value[place + 1 :]]
    elif isinstance(value, str):
        yield f"{value} {MARKER}"


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
# What is quoted when it is wrong.
FIELDS: dict[str, Any] = {
    "max_new_tokens": 2,
    "adapter_id": "a",
    "stop": ["a"],
    "seed": 1,
    "temperature": 1,
    "best_of": 1,
    "truncate": 3,
    "grammar": {"type": "regex", "value": "a"},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((path, {"inputs": "a", "parameters": FIELDS}) for path in ("/generate", "/generate_stream")),
    ("/tokenize", {"inputs": "a"}),
    ("/", {"inputs": "a", "stream": True, "parameters": FEW}),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 2, "model": "m", "stop": "a", "suffix": "a", "user": "u"},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "a", "name": "n"},
                {"role": "tool", "content": "a", "tool_call_id": "a"},
                {"role": "assistant", "content": "a"},
            ],
            "max_tokens": 2,
            "tools": [TOOL],
            "tool_choice": "auto",
            "response_format": SCHEMA,
            "chat_template_kwargs": {"a": "b"},
        },
    ),
    ("/chat_tokenize", {"messages": MESSAGES, "tools": [TOOL]}),
    (
        "/v1/responses",
        {
            "input": "a",
            "instructions": "a",
            "max_output_tokens": 16,
            "tools": [TOOL],
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {"model": "tgi", "messages": MESSAGES, "max_tokens": 4, "system": "a", "tools": [{}]},
    ),
    ("/v1/messages/count_tokens", {"model": "tgi", "messages": MESSAGES}),
    ("/vertex", {"instances": [{"inputs": "a", "parameters": FEW}]}),
    ("/invocations", {"inputs": "a", "parameters": FEW}),
    (INFER, {"id": "1", "inputs": [TENSOR], "outputs": [{"name": "a"}], "parameters": FEW}),
)
PATTERNS = ("(", "[", "(?=a)", "\\", "{9", "(?P<>a)", "a{9999}{9999}")


def hostile_grammars() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the compilers of grammars quote when they refuse it."""
    kinds: list[dict[str, Any]] = []
    for pattern in PATTERNS:
        kinds.append({"type": "regex", "value": MARKER + pattern})
        schema = {"type": "object", "properties": {MARKER: {"pattern": MARKER + pattern}}}
        kinds.append({"type": "json", "value": schema})
    kinds.append({"type": "json", "value": {"type": MARKER}})
    kinds.append({"type": "json", "value": {"$ref": f"#/{MARKER}"}})
    for grammar in kinds:
        yield "/generate", {"inputs": "a", "parameters": FEW | {"grammar": grammar}}
    for regex in (MARKER + pattern for pattern in PATTERNS):
        form = {"type": "regex", "value": regex}
        few = {"messages": MESSAGES, "max_tokens": 2}
        yield "/v1/chat/completions", few | {"response_format": form}


REFUSING = "{{ raise_exception('no: ' ~ messages | tojson ~ a) }}"


@contextmanager
def with_template(folder: Path) -> Iterator[LauncherHandle]:
    path = folder / "refusing.jinja"
    path.write_text(REFUSING)
    with contained(None, "--tokenizer-config-path", str(path)) as handle:
        yield handle


def test_nothing_that_was_written_is_in_the_log(tmp_path: Path) -> None:
    # Where the marker has taken the place of `max_new_tokens`, the answer is short all the same.
    with contained(None, "--max-input-tokens", "100", "--max-total-tokens", "200") as handle:
        num_refused = 0
        for path, body in (*marked_bodies(), *hostile_grammars()):
            headers = {"x-marker": MARKER, "user-agent": MARKER}
            response = handle.client.post(path, json=body, headers=headers)
            assert response.status_code < 500, response.text
            assert_no_paths(response)
            num_refused += response.status_code >= 400
        assert num_refused > 100
        for path in (f"/{MARKER}", f"/info?{MARKER}", f"/v1/{MARKER}"):
            handle.client.get(path)
        handle.client.post("/generate", content=f"{{{MARKER}", headers={"content-type": MARKER})
        assert "WARN" in handle.log
        assert MARKER not in handle.log
        handle.assert_idle()
    with with_template(tmp_path) as handle:
        body = {"messages": [{"role": "user", "content": MARKER}]}
        response = ask(handle, "/v1/chat/completions", body)
        assert response.status_code == 400 and MARKER in response.text
        assert ask(handle, "/chat_tokenize", body).status_code == 422
        assert MARKER not in handle.log


def marked_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, body in BODIES:
        for other in marked(body):
            yield path, other


def assert_no_paths(response: httpx.Response) -> None:
    model = str(Path(text_generation_launcher.__file__).parent)
    assert model not in response.text and "/tmp/" not in response.text, response.text
