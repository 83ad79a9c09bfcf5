"""KServe's routes: bytes in, bytes out, in the order of the inputs."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from text_generation_router.errors import GenerationError

from router.tests.serving import Server, serve

INFER = "/v2/models/any/versions/7/infer"


# One application for all tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serve(tmp_path_factory.mktemp("model"), "hé!") as server:
        yield server


def inference(*prompts: bytes, **parameters: object) -> dict[str, Any]:
    return {
        "id": "x",
        "inputs": [
            {"name": f"i{place}", "shape": [1, 1], "datatype": "UINT8", "data": list(prompt)}
            for place, prompt in enumerate(prompts)
        ],
        "outputs": [{"name": f"o{place}"} for place in range(len(prompts))],
        "parameters": {"max_new_tokens": 3, **parameters},
    }


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", INFER[:-5] + "ready"])
async def test_health(server: Server, path: str) -> None:
    response = await server.client.get(path)
    assert (response.status_code, response.json()) == (200, {"live": True})
    server.shards.failure = GenerationError("gone")
    is_live = path.endswith("live")
    assert (await server.client.get(path)).status_code == (200 if is_live else 503)
    server.shards.failure = None


async def test_metadata(server: Server) -> None:
    answer = (await server.client.get("/v2")).json()
    assert answer.pop("version")
    assert answer == {
        "name": "text-generation-inference",
        "extensions": ["health", "models", "metrics"],
    }
    response = await server.client.get("/v2/models/m/versions/1")
    assert response.json() == {"name": "m", "version": "1", "extensions": ["infer", "ready"]}


async def test_infer(server: Server) -> None:
    response = await server.client.post(INFER, json=inference("né".encode(), b"n"))
    assert response.status_code == 200
    data = list("hé".encode())
    assert response.json() == {
        "id": "x",
        "outputs": [
            {"name": "o0", "shape": [1, 3], "datatype": "BYTES", "data": data},
            {"name": "o1", "shape": [1, 3], "datatype": "BYTES", "data": data},
        ],
    }
    response = await server.client.post(INFER, json=inference(b"n", return_full_text=True))
    assert bytes(response.json()["outputs"][0]["data"]).decode() == "nhé"


@pytest.mark.parametrize(
    ("change", "error_type", "words"),
    [
        ({"outputs": []}, "length mismatch", "Inputs and outputs length mismatch"),
        (inference(b"\xff"), "utf8", "`data` must be text in UTF-8"),
        (inference(b"n", details=True), "validation", "`details` has no place"),
        (inference(b"n", top_k=0), "validation", "`top_k` must be strictly positive"),
        ({"inputs": [{"name": "a", "data": [256]}]}, "validation", "`inputs.0.shape`"),
        ({"id": 1}, "validation", "`id`"),
    ],
)
async def test_refusals(
    server: Server, change: dict[str, object], error_type: str, words: str
) -> None:
    response = await server.client.post(INFER, json=inference(b"n") | change)
    assert response.status_code == 422
    assert response.json()["error_type"] == error_type
    assert words in response.json()["error"]


async def test_one_failure_fails_all(server: Server) -> None:
    response = await server.client.post(INFER, json=inference(b"n", b""))
    assert response.status_code == 422 and "`inputs` cannot be empty" in response.text


async def test_a_field_that_tgi_does_not_have_is_named_or_followed(server: Server) -> None:
    response = await server.client.post(INFER, json=inference(b"n", priority=3))
    assert response.headers["warning"] == '299 - "changes nothing here: parameters.priority"'
    assert response.json()["outputs"][0]["shape"] == [1, 3]
    # TGI has no binary outputs: such a request is the protocol's.
    response = await server.client.post(INFER, json=inference(b"n", binary_data_output=True))
    assert response.status_code == 200 and response.content.endswith("hé".encode())
    assert "inference-header-content-length" in response.headers
