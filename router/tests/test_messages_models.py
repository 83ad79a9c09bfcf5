"""GET /v1/models as Anthropic's clients read it, beside OpenAI's form of it."""

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import pytest

from router.tests.serving import Server, serve

ANTHROPICS = {"anthropic-version": "2023-06-01"}
NAMES = ("a", "org/b", "c")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path, served_model_name=NAMES, any_model_name=False) as server:
        yield server


async def test_list(server: Server) -> None:
    answer = (await server.client.get("/v1/models", headers=ANTHROPICS)).json()
    assert [model["id"] for model in answer["data"]] == list(NAMES)
    assert (answer["first_id"], answer["last_id"], answer["has_more"]) == ("a", "c", False)
    first = answer["data"][0]
    created = datetime.fromisoformat(first.pop("created_at"))
    assert created.timestamp() == server.services.loaded_at
    assert first == {
        "type": "model",
        "id": "a",
        "display_name": "a",
        "lifecycle": "active",
        "max_input_tokens": 4095,
        "max_tokens": 4095,
    }
    # Anthropic's package keeps it beside each answer.
    for given in (ANTHROPICS, {}):
        headers = (await server.client.get("/v1/models", headers=given)).headers
        assert headers.get("request-id") == (headers["x-request-id"] if given else None)
    listed = (await server.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert {model["created"] for model in listed["data"]} == {server.services.loaded_at}


@pytest.mark.parametrize(
    ("asked", "names", "has_more"),
    [
        ({"limit": 2}, ["a", "org/b"], True),
        ({"limit": 2, "after_id": "org/b"}, ["c"], False),
        ({"limit": 1, "before_id": "c"}, ["org/b"], True),
        ({"before_id": "a"}, [], False),
        ({"after_id": "nope"}, [], False),
        ({"before_id": "nope"}, [], False),
    ],
)
async def test_pages(
    server: Server, asked: dict[str, str], names: list[str], has_more: bool
) -> None:
    answer = (await server.client.get("/v1/models", params=asked, headers=ANTHROPICS)).json()
    assert [model["id"] for model in answer["data"]] == names
    assert answer["has_more"] is has_more
    ends = (names[0], names[-1]) if names else (None, None)
    assert (answer["first_id"], answer["last_id"]) == ends


async def test_one(server: Server) -> None:
    answer = (await server.client.get("/v1/models/org/b", headers=ANTHROPICS)).json()
    assert (answer["type"], answer["id"]) == ("model", "org/b")
    assert (await server.client.get("/v1/models/b", headers=ANTHROPICS)).json() == answer
    assert (await server.client.get("/v1/models/org/b")).json()["object"] == "model"


async def test_errors(server: Server) -> None:
    for path, status in (("/v1/models/claude", 404), ("/v1/models?limit=0", 400)):
        answer = await server.client.get(path, headers=ANTHROPICS)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
    answer = await server.client.get("/v1/models/claude")
    assert answer.json()["error"]["code"] == "model_not_found"
