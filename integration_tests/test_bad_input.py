"""Invalid requests: their status and error body; other requests are not affected, nothing leaks."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from integration_tests.server import LauncherHandle, wait_until

PROMPT = "the cat sat on "
JSON = {"content-type": "application/json"}
LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos_token": True}


@pytest.fixture
def accompanied(server: LauncherHandle) -> Iterator[LauncherHandle]:
    """The server while it serves another request, which must not be affected."""
    with ThreadPoolExecutor() as pool:
        neighbour = pool.submit(server.stream, "a neighbour says ", **LONG)
        yield server
        assert len(neighbour.result(60)) == 100


BODIES: dict[str, tuple[bytes, int]] = {
    "not json": (b"hello", 400),
    "truncated json": (b'{"inputs": "a', 400),
    "empty body": (b"", 400),
    "nan": (b'{"inputs": "a", "parameters": {"temperature": NaN}}', 400),
    "infinity": (b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 422),
    "larger than float32": (b'{"inputs": "a", "parameters": {"temperature": 1e300}}', 422),
    "invalid utf-8": (b'{"inputs": "\xff\xfe"}', 400),
    "lone surrogate": (b'{"inputs": "\\ud800"}', 400),
    "array": (b'["a"]', 422),
    "string": (b'"a"', 422),
    "null": (b"null", 422),
    "no inputs": (b'{"parameters": {}}', 422),
    "inputs a number": (b'{"inputs": 5}', 422),
    "inputs a list": (b'{"inputs": ["a"]}', 422),
    "inputs null": (b'{"inputs": null}', 422),
    "parameters null": (b'{"inputs": "a", "parameters": null}', 422),
    "parameters a list": (b'{"inputs": "a", "parameters": [1]}', 422),
    "deeply nested": (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "huge integer": (b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}", 422),
}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_malformed_bodies(server: LauncherHandle, name: str, path: str) -> None:
    content, status = BODIES[name]
    response = server.client.post(path, content=content, headers=JSON)
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"error", "error_type"}
    assert answer["error_type"] == "validation"
    assert 10 < len(answer["error"]) < 400


def test_body_of_ten_megabytes(accompanied: LauncherHandle) -> None:
    content = json.dumps({"inputs": "a" * 10_000_000}).encode()
    response = accompanied.client.post("/generate", content=content, headers=JSON)
    assert response.status_code == 413
    assert "length limit exceeded" in response.json()["error"]

    def in_pieces() -> Iterator[bytes]:
        for start in range(0, len(content), 65536):
            yield content[start : start + 65536]

    # Without a Content-Length the limit counts what arrives.
    with LauncherClient(accompanied) as connection:
        assert connection.post_chunked("/generate", in_pieces()) == 413


class LauncherClient:
    """A bare connection, for what a well-behaved client can not do."""

    def __init__(self, handle: LauncherHandle, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", handle.port))

    def __enter__(self) -> "LauncherClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, path: str, body: bytes, length: int | None = None) -> None:
        """A whole request; `length` lies about the body's."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def post_chunked(self, path: str, pieces: Iterator[bytes]) -> int:
        """The status; the server may answer and hang up before it has read everything."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for piece in pieces:
                self.socket.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.socket.sendall(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pieces.close()  # type: ignore[attr-defined]
        return int(self.socket.recv(4096).split()[1])


@pytest.mark.parametrize(
    "parameters",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**32},
        {"max_new_tokens": "5"},
        {"max_new_tokens": 5.5},
        {"temperature": "hot"},
        {"temperature": True},
        {"do_sample": "yes"},
        {"do_sample": None},
        {"details": 1},
        {"stop": "x"},
        {"stop": None},
        {"stop": [1]},
        {"top_k": 2**31},
        {"top_n_tokens": -1},
        {"truncate": -1},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": [1.0]},
    ],
    ids=str,
)
def test_wrong_types(server: LauncherHandle, parameters: dict[str, Any]) -> None:
    body = {"inputs": PROMPT, "parameters": parameters}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == "validation"
    (name,) = parameters
    assert name in response.json()["error"]


def test_prompts_at_the_edges(accompanied: LauncherHandle) -> None:
    def ask(inputs: str, **parameters: Any) -> tuple[int, str]:
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 2, **parameters}}
        response = accompanied.client.post("/generate", json=body)
        return response.status_code, response.json().get("error", "")

    assert ask("") == (422, "Input validation error: `inputs` cannot be empty")
    status, error = ask("日" * 101)
    assert (status, error) == (
        422,
        "Input validation error: `inputs` must have less than 300 tokens. Given: 303",
    )
    assert ask("日" * 100) == (200, "")
    assert ask("日" * 200, truncate=300) == (200, "")
    status, error = ask("日" * 60_000)
    assert status == 422
    assert ask("null \0 bytes \0") == (200, "")
    assert ask("\0") == (200, "")
    assert ask("\u202e\ufeff\ufffd 🏳️‍🌈") == (200, "")


def test_client_leaves_a_stream(accompanied: LauncherHandle) -> None:
    dropped = 'tgi_request_failure{err="dropped"}'
    before = accompanied.metrics()[dropped]
    body = {"inputs": PROMPT, "parameters": LONG | {"max_new_tokens": 480}}
    with accompanied.client.stream("POST", "/generate_stream", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: accompanied.metrics()[dropped] == before + 1, 20, "it is counted as dropped")


def test_client_leaves_a_whole_answer(accompanied: LauncherHandle) -> None:
    dropped = 'tgi_request_failure{err="dropped"}'
    before = accompanied.metrics()[dropped]
    started = accompanied.metrics()["tgi_request_count"]
    body = {"inputs": PROMPT, "parameters": LONG | {"max_new_tokens": 480}}
    with LauncherClient(accompanied) as connection:
        connection.send("/generate", json.dumps(body).encode())
        wait_until(
            lambda: accompanied.metrics()["tgi_request_count"] > started, 20, "it has arrived"
        )
    wait_until(lambda: accompanied.metrics()[dropped] == before + 1, 20, "it is counted as dropped")


def test_client_leaves_before_its_body_is_there(accompanied: LauncherHandle) -> None:
    with LauncherClient(accompanied) as connection:
        connection.send("/generate", b'{"inputs": "a', length=1000)
    assert accompanied.generate(PROMPT, max_new_tokens=2)["generated_text"]


def test_clients_that_never_read(accompanied: LauncherHandle) -> None:
    """Their answers pile up somewhere, but they hold neither rows nor blocks nor the others."""
    body = {"inputs": PROMPT, "parameters": LONG | {"max_new_tokens": 480, "top_n_tokens": 5}}
    connections = [LauncherClient(accompanied, receive_buffer=2048) for _ in range(8)]
    try:
        for connection in connections:
            connection.send("/generate_stream", json.dumps(body).encode())
        assert len(accompanied.stream(PROMPT, **LONG)) == 100
        accompanied.assert_idle()
    finally:
        for connection in connections:
            connection.socket.close()


def test_garbage_instead_of_http(accompanied: LauncherHandle) -> None:
    with LauncherClient(accompanied) as connection:
        connection.socket.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.socket.recv(4096).startswith(b"HTTP/1.1 400")
