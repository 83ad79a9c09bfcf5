"""What /docs shows in its editors is sent as it is to the embedded model, and answered.

The requests are made of the served OpenAPI document alone, as Swagger UI makes them.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from integration_tests.conformance.transcript import API_KEY, SERVER_FLAGS
from integration_tests.server import LauncherHandle, SharedServers

Json = dict[str, Any]
REFERENCE = re.compile(r"""(?:src|href)\s*=\s*["']([^"']+)["']|url:\s*["']([^"']+)["']""")
# What the embedded model says of the function that the examples ask for.
ANSWER = "Remove any common leading whitespace"
# Fields of answers that hold a text, or what is new of one.
TEXTS = ("generated_text", "text", "content", "delta", "predictions")


@pytest.fixture(scope="module")
def keyed_server(shared_servers: SharedServers) -> Iterator[LauncherHandle]:
    """The embedded model, which needs a key: the server of the transcripts."""
    handle = shared_servers.get(None, *SERVER_FLAGS)
    yield handle
    handle.assert_idle()


@pytest.fixture(scope="module")
def document(keyed_server: LauncherHandle) -> Json:
    headers = {"authorization": f"Bearer {API_KEY}"}
    response = keyed_server.client.get("/api-doc/openapi.json", headers=headers)
    assert response.status_code == 200
    served: Json = response.json()
    return served


def events(response: httpx.Response) -> list[Json]:
    """All that came as server-sent events."""
    lines = [line.removeprefix("data:").strip() for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def texts(answer: Any) -> Iterator[str]:
    """The texts of an answer or of its events, in order."""
    if isinstance(answer, list):
        for one in answer:
            yield from texts(one)
    elif isinstance(answer, dict):
        for name, value in answer.items():
            if name in TEXTS:
                yield from [value] if isinstance(value, str) else texts(value)
                if name == "predictions":
                    yield from value
            elif isinstance(value, dict | list):
                yield from texts(value)


def has_answer(answer: Any) -> bool:
    return ANSWER in "".join(texts(answer))


def is_version(answer: Any) -> bool:
    return re.fullmatch(r"3\.\d{1,2}", answer["generated_text"]) is not None


def is_json(answer: Any) -> bool:
    written = json.loads(answer["choices"][0]["message"]["content"])
    return written.keys() == {"function", "is_useful"} and isinstance(written["is_useful"], bool)


def has_tensor(answer: Any) -> bool:
    (tensor,) = answer["outputs"]
    return ANSWER in bytes(tensor["data"]).decode()


def has_texts(answer: Any) -> bool:
    (tensor,) = answer["outputs"]
    return len(tensor["data"]) == 2 and ANSWER in tensor["data"][0]


def has_tokens(answer: Any) -> bool:
    return "".join(token["text"] for token in answer) == "What does textwrap.dedent do?"


def has_vectors(answer: Any) -> bool:
    lengths = [sum(number**2 for number in one["embedding"]) for one in answer["data"]]
    return len(lengths) == 2 and all(abs(length - 1) < 1e-3 for length in lengths)


# Path, and for one example of several its name → what the answer must be.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "/": has_answer,
    "/generate": has_answer,
    "/generate A text that matches a regular expression": is_version,
    "/generate_stream": has_answer,
    "/tokenize": has_tokens,
    "/chat_tokenize": lambda answer: "textwrap.dedent" in answer["templated_text"],
    "/invocations": has_answer,
    "/vertex": has_answer,
    "/v1/completions": has_answer,
    "/v1/chat/completions": has_answer,
    "/v1/chat/completions JSON that follows a schema": is_json,
    "/v1/embeddings": has_vectors,
    "/v1/responses": has_answer,
    "/v1/messages": has_answer,
    "/v1/messages/count_tokens": lambda answer: answer["input_tokens"] > 5,
    "/v2/models/{model_name}/infer": has_texts,
    "/v2/models/{model_name}/versions/{model_version}/infer": has_tensor,
}
# The embedded model is no reranker, and the answer says so.
NEEDS_A_RERANKER = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}


def with_parameters(path: str, operation: Json) -> str:
    """The path, with the examples of its parameters."""
    for parameter in operation.get("parameters", ()):
        if parameter["required"]:
            assert "example" in parameter, f"{path}: give {parameter['name']} an example"
            path = path.replace(f"{{{parameter['name']}}}", parameter["example"])
    return path


def bodies(path: str, operation: Json) -> Iterator[tuple[str, str, Json]]:
    """Content type, name and body of each example; the first is what the editor shows."""
    for content_type, content in operation["requestBody"]["content"].items():
        examples = content.get("examples")
        assert examples, f"{path}: give it an example in api/routes.py"
        for name, example in examples.items():
            yield content_type, name, example["value"]


def keys_of(document: Json, operation: Json) -> list[dict[str, str]]:
    """The headers with the key, one for each of the alternatives."""
    headers = []
    for alternative in operation["security"]:
        (name,) = alternative
        scheme = document["components"]["securitySchemes"][name]
        if scheme["type"] == "http":
            assert scheme["scheme"] == "bearer"
            headers.append({"authorization": f"Bearer {API_KEY}"})
        else:
            assert (scheme["type"], scheme["in"]) == ("apiKey", "header")
            headers.append({scheme["name"]: API_KEY})
    return headers


def test_every_example_works(keyed_server: LauncherHandle, document: Json) -> None:
    num_posts = 0
    for path, methods in document["paths"].items():
        if "post" not in methods:
            continue
        num_posts += 1
        operation = methods["post"]
        url = with_parameters(path, operation)
        ways = keys_of(document, operation)
        assert len(ways) == 2
        for content_type, name, body in bodies(path, operation):
            headers = {"content-type": content_type, "accept": "application/json"}
            refused = keyed_server.client.post(url, json=body, headers=headers)
            assert refused.status_code == 401, (path, name)
            for key in ways:
                response = keyed_server.client.post(url, json=body, headers=headers | key)
                if path in NEEDS_A_RERANKER:
                    assert response.status_code == 404 and "rerank" in response.text, path
                    continue
                assert response.status_code == 200, (path, name, response.text)
                check = CHECKS.get(f"{path} {name}") or CHECKS[path]
                is_stream = response.headers["content-type"].startswith("text/event-stream")
                assert is_stream == (path == "/generate_stream" or body.get("stream", False))
                answer = events(response) if is_stream else response.json()
                assert check(answer), (path, name, response.text)
    assert num_posts >= 13


def test_every_get_route_answers_what_the_page_sends(
    keyed_server: LauncherHandle, document: Json
) -> None:
    for path, methods in document["paths"].items():
        if "get" not in methods:
            continue
        url = with_parameters(path, methods["get"])
        status = keyed_server.client.get(url).status_code
        if "security" not in methods["get"]:
            assert status == 200, path
            continue
        assert status == 401, path
        for key in keys_of(document, methods["get"]):
            assert keyed_server.client.get(url, headers=key).status_code == 200, path


def test_the_page_needs_nothing_from_elsewhere(server: LauncherHandle) -> None:
    """It renders on a machine without a network."""
    page = server.client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"^\s*//.*$|<!--.*?-->", "", page.text, flags=re.MULTILINE)
    references = [one or two for one, two in REFERENCE.findall(page.text)]
    kinds = [reference.rsplit(".", 1)[-1] for reference in references]
    assert {"js", "css", "json"} <= set(kinds)
    for reference in references:
        assert reference.startswith("/")
        asset = server.client.get(reference)
        assert asset.status_code == 200 and asset.content, reference
