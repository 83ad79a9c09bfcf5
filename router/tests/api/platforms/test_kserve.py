"""The Open Inference Protocol as its clients speak it, beside the golden transcripts and Triton's
client: shapes, binary tensors, errors; and where a request is TGI's."""

import json
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from text_generation_router.errors import GenerationError

from router.tests.serving import Server, serve, shared_server

INFER = "/v2/models/m/infer"
VERSION = "/v2/models/m/versions/7/infer"
GREEDY = {"max_new_tokens": 4}
JSON_LENGTH = "inference-header-content-length"


running, server = shared_server(serve, "hé!")


def tensor(*data: Any, shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    shape = [len(data)] if shape is None else shape
    return {"name": "text_input", "shape": shape, "datatype": "BYTES", "data": [*data], **more}


def elements(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


async def infer(server: Server, path: str = INFER, **body: Any) -> httpx.Response:
    return await server.client.post(path, json={"parameters": GREEDY} | body)


async def infer_binary(
    server: Server, behind: bytes, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    """As Triton's client sends it: without a content type."""
    given = {"name": "a", "shape": [2], "datatype": "BYTES"}
    given["parameters"] = {"binary_data_size": len(behind)}
    parameters = {**GREEDY, "binary_data_output": True}
    text = json.dumps({"inputs": [given | more], "parameters": parameters}).encode()
    headers = {JSON_LENGTH: str(len(text))} | (headers or {})
    return await server.client.post(INFER, content=text + behind, headers=headers)


async def test_shapes_names_and_several_tensors(server: Server) -> None:
    inputs = [tensor(["n"], ["m"], shape=[2, 1]), tensor("n")]
    answer = (await infer(server, inputs=inputs)).json()
    told = [(output["name"], output["shape"]) for output in answer["outputs"]]
    assert told == [("text_output_0", [2, 1]), ("text_output_1", [1])]
    assert "id" not in answer
    answer = (await infer(server, inputs=inputs, outputs=[{"name": "x"}, {"name": "y"}])).json()
    assert [output["name"] for output in answer["outputs"]] == ["x", "y"]


async def test_bytes_of_one_text(server: Server) -> None:
    data = "né".encode()
    response = await infer(server, inputs=[tensor(*data, datatype="UINT8")])
    assert response.json()["outputs"][0]["data"] == ["hé!"]
    # With `id` and `outputs` it is TGI's, on TGI's path.
    whole = {"id": "1", "outputs": [{"name": "o"}], "inputs": [tensor(*data, datatype="UINT8")]}
    response = await infer(server, VERSION, **whole)
    assert response.json()["outputs"][0]["data"] == list("hé!".encode())


async def test_outputs_say_how_they_want_to_be_sent(server: Server) -> None:
    outputs = [
        {"name": "x", "parameters": {"binary_data": True}},
        {"name": "y", "parameters": {"binary_data": False}},
    ]
    parameters = {**GREEDY, "binary_data_output": True}
    inputs = [tensor("n"), tensor("m")]
    response = await infer(server, inputs=inputs, outputs=outputs, parameters=parameters)
    length = int(response.headers[JSON_LENGTH])
    first, second = json.loads(response.content[:length])["outputs"]
    assert "data" not in first and second["data"] == ["hé!"]
    assert response.content[length:] == elements("hé!".encode())


@pytest.mark.slow
async def test_without_parameters_of_ours_tokens_are_drawn_as_by_generate(server: Server) -> None:
    for parameters in ({"binary_data_output": False}, None):
        body = {"inputs": [tensor("n")], "parameters": parameters}
        sent = {name: value for name, value in body.items() if value is not None}
        response = await server.client.post(INFER, json=sent | {"outputs": None})
        assert response.status_code == 200, response.text
        assert server.shards.requests[-1].sampling.is_sampling


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"inputs": [tensor("n", shape=[2**63] * 9)]}, "can have 8 dimensions. Given: 9"),
    ({"inputs": [tensor(shape=[0])]}, "has no elements"),
    ({"inputs": []}, "at least one tensor"),
    ({"inputs": [tensor(["n"], "m")]}, "rows and elements are mixed"),
    ({"inputs": [tensor("n", 1)]}, "inputs.0.data"),
    ({"inputs": [tensor("n", datatype="UINT8")]}, "send them as BYTES"),
    ({"inputs": [tensor(255, datatype="UINT8")]}, "must be text in UTF-8"),
    ({"inputs": [tensor("")]}, "cannot be empty"),
    ({"inputs": [tensor("n")], "outputs": [{"name": "a"}] * 2}, "2 outputs and 1 inputs"),
    ({"inputs": [tensor("n")], "parameters": {"details": True}}, "`details` has no place"),
    ({"inputs": [tensor("n")], "parameters": {"sequence_id": 1}}, "not supported"),
    ({"inputs": [tensor("n", parameters={"shared_memory_region": "a"})]}, "not supported"),
    ({"inputs": [{"name": "a", "shape": [1], "datatype": "BYTES"}]}, "Field required"),
]


@pytest.mark.parametrize(("body", "words"), WRONG)
async def test_refusals(server: Server, body: dict[str, Any], words: str) -> None:
    response = await infer(server, **body)
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"] and words in response.json()["error"]
    response = await infer(server, VERSION, **body)
    assert response.status_code in (400, 422) and words in response.json()["error"]


@pytest.mark.parametrize(
    ("data", "more", "headers", "words"),
    [
        (elements(b"n", b"\xff"), {}, {}, "element 1 is not"),
        (elements(b"n", b"m")[:-1], {}, {}, "ends within an element"),
        (elements(b"n")[:3], {}, {}, "ends within an element"),
        (b"\0" * 4 * 5000, {}, {}, "more than 4096 elements"),
        (b"n", {"parameters": {"binary_data_size": 2}}, {}, "must be the length of the body"),
        (b"n", {"parameters": {"binary_data_size": -1}}, {}, "must be a number of bytes"),
        (b"n", {"parameters": {}}, {}, "must be the length of the body"),
        (b"n", {"data": ["n"]}, {}, "both `data` and `binary_data_size`"),
        (b"n", {}, {JSON_LENGTH: "9999"}, "Failed to parse"),
        (b"n", {}, {JSON_LENGTH: "-1"}, "must be a number of bytes"),
    ],
)
async def test_binary_refusals(
    server: Server, data: bytes, more: dict[str, Any], headers: dict[str, str], words: str
) -> None:
    response = await infer_binary(server, data, headers, **more)
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"] and words in response.json()["error"]


async def test_large_binary_tensor(server: Server) -> None:
    response = await infer_binary(server, elements(b"x" * 100_000, b"n"))
    assert response.status_code == 400
    assert "must be <= 4096" in response.json()["error"]


@pytest.mark.parametrize("name", ["m", "meta-llama/Llama-3"])
async def test_names_have_slashes_and_no_other_parts_of_the_path(server: Server, name: str) -> None:
    assert (await server.client.get(f"/v2/models/{name}")).json()["name"] == name
    assert (await server.client.get(f"/v2/models/{name}/ready")).status_code == 200
    response = await server.client.get(f"/v2/models/{name}/config")
    assert (response.status_code, list(response.json())) == (404, ["error"])


async def test_names_keys_and_readiness_are_errors_of_the_protocol(tmp_path: Path) -> None:
    async with serve(tmp_path, any_model_name=False, api_key=("k",)) as server:
        response = await server.client.get("/v2/models/m")
        assert (response.status_code, list(response.json())) == (401, ["error"])
        key = {"authorization": "Bearer k"}
        response = await server.client.get("/v2/models/m", headers=key)
        assert response.status_code == 404 and "is not served" in response.json()["error"]
        response = await server.client.get("/v2/models/m/ready")
        served = server.services.config.model_names[0]
        assert response.status_code == 404 and served not in response.json()["error"]
        assert (await server.client.get("/v2/models/tgi/ready")).status_code == 200
        body = {"inputs": [tensor("n")]}
        response = await server.client.post(INFER, json=body, headers=key)
        assert response.status_code == 404
        assert (await server.client.get("/v2/models/tgi", headers=key)).status_code == 200


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", VERSION[:-5] + "ready"])
async def test_health(server: Server, path: str) -> None:
    response = await server.client.get(path)
    assert (response.status_code, response.json()) == (200, {"live": True})
    server.shards.failure = GenerationError("gone")
    is_live = path.endswith("live")
    assert (await server.client.get(path)).status_code == (200 if is_live else 503)
    server.shards.failure = None


def tgis(**parameters: object) -> dict[str, Any]:
    """A request in TGI's form."""
    given = {"name": "i", "shape": [1, 1], "datatype": "UINT8", "data": list(b"n")}
    return {
        "id": "x",
        "inputs": [given],
        "outputs": [{"name": "o"}],
        "parameters": {**GREEDY, **parameters},
    }


async def test_a_field_that_tgi_does_not_have_is_named_or_followed(server: Server) -> None:
    response = await server.client.post(VERSION, json=tgis(priority=3))
    assert response.headers["warning"] == '299 - "changes nothing here: parameters.priority"'
    assert response.json()["outputs"][0]["shape"] == [1, 4]
    # TGI has no binary outputs: such a request is the protocol's.
    response = await server.client.post(VERSION, json=tgis(binary_data_output=True))
    assert response.status_code == 200 and response.content.endswith("hé!".encode())
    assert "inference-header-content-length" in response.headers
