"""/invocations: one path for the bodies of three routes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from router.tests.chats import serve_chat
from router.tests.serving import Server

# One application for all tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    # Without the cache the second answer tells the same as the first.
    async with serve_chat(folder, "hé", disable_prefix_caching=True) as server:
        yield server


def without_ids(answer: Any) -> Any:
    """The same without what is new in every answer."""
    if not isinstance(answer, dict):
        return answer
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "n", "parameters": {"max_new_tokens": 1}}),
        ("/v1/completions", {"prompt": "n", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}]}),
    ],
)
async def test_same_as_the_route_of_the_body(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    invoked = await server.client.post("/invocations", json=body)
    asked = await server.client.post(path, json=body)
    assert invoked.status_code == asked.status_code == 200
    assert without_ids(invoked.json()) == without_ids(asked.json())
    assert invoked.headers["x-prompt-tokens"] == asked.headers["x-prompt-tokens"]
    invoked = await server.client.post("/invocations", json=body | {"stream": True})
    assert invoked.headers["content-type"] == "text/event-stream"
    assert invoked.text.endswith("data: [DONE]\n\n") == ("inputs" not in body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "data did not match any variant of untagged enum SagemakerRequest"),
        ({"inputs": 1}, "inputs`: Input should be a valid string"),
        ({"messages": []}, "messages`: List should have at least 1 item"),
    ],
)
async def test_refusals(server: Server, body: dict[str, Any], words: str) -> None:
    response = await server.client.post("/invocations", json=body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation" and words in response.json()["error"]
