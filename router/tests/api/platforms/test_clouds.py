"""/vertex and the paths that Vertex AI names."""

from typing import Any

import pytest
from text_generation_router.errors import GenerationError

from router.tests.chats import CALL, serve_chat
from router.tests.serving import Server, shared_server

PREDICT = "/v1/endpoints/1/deployedModels/2:predict"
CHAT = {"messages": [{"role": "user", "content": "q"}]}


running, server = shared_server(
    serve_chat, f"hé{CALL}", ends=True, aip_predict_route=PREDICT, aip_health_route="/generate"
)


def instance(**parameters: object) -> dict[str, Any]:
    return {"inputs": "n", "parameters": {"max_new_tokens": 3, **parameters}}


@pytest.mark.parametrize("path", ["/vertex", PREDICT])
async def test_predictions_in_order(server: Server, path: str) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    instances = [
        instance(),
        CHAT | {"tools": tools},
        instance(return_full_text=True, max_new_tokens=1),
        instance(stop=["h"]),
    ]
    before = server.services.metrics.request_count.value()
    response = await server.client.post(path, json={"instances": instances})
    assert response.status_code == 200
    assert response.json() == {"predictions": ["hé", f"hé{CALL}", "nh", "h"]}
    assert server.services.metrics.request_count.value() == before + 4


async def test_health_on_a_taken_path(server: Server) -> None:
    response = await server.client.get("/generate")
    assert (response.status_code, response.content) == (200, b"")
    response = await server.client.post("/generate", json=instance())
    assert response.json() == {"generated_text": "hé"}
    response = await server.client.put("/generate")
    assert (response.status_code, response.headers["allow"]) == (405, "GET,HEAD,POST")
    server.shards.failure = GenerationError("gone")
    assert (await server.client.get("/generate")).status_code == 503
    server.shards.failure = None


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        ([{}], "inputs`: Field required"),
        ([CHAT | {"stream": True}], "a prediction is one text"),
        ([CHAT | {"n": 2}], "a prediction is one text"),
        ([CHAT | {"prompt_logprobs": 0}], "`prompt_logprobs` and `return_token_ids` out"),
        ([CHAT | {"return_token_ids": True}], "`prompt_logprobs` and `return_token_ids` out"),
        ([instance(), {"inputs": ""}], "`inputs` cannot be empty"),
    ],
)
async def test_refusals(server: Server, instances: list[dict[str, Any]], words: str) -> None:
    for path in ("/vertex", PREDICT):
        response = await server.client.post(path, json={"instances": instances})
        assert response.status_code == 422
        assert response.json()["error_type"] == "validation" and words in response.json()["error"]


async def test_a_failure_keeps_its_status(server: Server) -> None:
    server.shards.failure = GenerationError("Server error: oh")
    response = await server.client.post("/vertex", json={"instances": [instance(), CHAT]})
    assert (response.status_code, response.json()["error_type"]) == (424, "generation")
    server.shards.failure = None
