"""Compressed bodies become no more than the limit; JSON that costs too much is refused."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from text_generation_router.api.body import BodyError, inflated
from text_generation_router.edge.body_cost import is_too_costly

from router.tests.serving import Server, serve

BODY = b'{"inputs": "n", "parameters": {"max_new_tokens": 1}}'
COMPRESSED = {
    "gzip": ("gzip", gzip.compress(BODY)),
    "x-gzip": ("x-gzip", gzip.compress(BODY)),
    "deflate": ("deflate", zlib.compress(BODY)),
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path) as server:
        yield server


def headers(encoding: str) -> dict[str, str]:
    return {"content-type": "application/json", "content-encoding": encoding}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_bodies_are_inflated_up_to_the_limit(name: str) -> None:
    encoding, compressed = COMPRESSED[name]
    assert inflated(compressed, encoding, len(BODY)) == BODY
    with pytest.raises(BodyError, match="length limit exceeded"):
        inflated(compressed, encoding, len(BODY) - 1)


@pytest.mark.parametrize(
    ("encoding", "compressed", "words"),
    [
        ("gzip", BODY, "not gzip"),
        ("gzip", zlib.compress(BODY), "not gzip"),
        ("gzip", gzip.compress(BODY)[:-1], "cut off"),
        ("gzip", gzip.compress(BODY)[:5], "cut off"),
        ("gzip", gzip.compress(BODY) * 2, "something follows"),
        ("deflate", zlib.compress(BODY) + b"x", "something follows"),
        ("deflate", b"", "cut off"),
    ],
    # gzip writes the time down: without names of their own each process would call them otherwise.
    ids=["plain", "zlib", "cut", "head", "more", "more of deflate", "nothing"],
)
def test_other_bytes_are_refused(encoding: str, compressed: bytes, words: str) -> None:
    with pytest.raises(BodyError, match=words):
        inflated(compressed, encoding, 1000)


async def test_refusals(server: Server) -> None:
    limit = server.services.config.payload_limit
    cases = [
        ("gzip", gzip.compress(b" " * (limit + 1)), 413, f"At most {limit} bytes"),
        ("gzip", gzip.compress(b"{" * 10), 400, "Failed to parse"),
        ("gzip", gzip.compress(b"{}"), 422, "`inputs`: Field required"),
        ("gzip", gzip.compress(b""), 400, "Failed to parse"),
        ("gzip", BODY, 400, "not gzip"),
        ("br", BODY, 415, "gzip or deflate"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415, "gzip or deflate"),
        ("b" * 1000, BODY, 415, "gzip or deflate"),
    ]
    for encoding, content, status, words in cases:
        response = await server.client.post("/generate", content=content, headers=headers(encoding))
        assert response.status_code == status, encoding
        assert words in response.json()["error"] and len(response.json()["error"]) < 300
        asked = response.headers.get("accept-encoding")
        assert asked == ("gzip, deflate" if status == 415 else None)
    response = await server.client.post("/generate", content=BODY, headers=headers("identity"))
    assert response.status_code == 200


async def test_more_than_may_wait_are_told_to_come_again(tmp_path: Path) -> None:
    compressed = gzip.compress(b'{"inputs":"' + b"n" * 100_000 + b'"}')
    async with serve(tmp_path, max_concurrent_requests=2) as server:

        async def ask() -> httpx.Response:
            return await server.client.post(
                "/generate", content=compressed, headers=headers("gzip")
            )

        responses = await asyncio.gather(*(ask() for _ in range(40)))
    refused = [response for response in responses if response.status_code != 422]
    assert refused
    for response in refused:
        assert response.status_code == 429 and response.json()["error_type"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        (b"[" + b"{}," * 600_000 + b"{}]", True),
        (b'["' + b"{}," * 600_000 + b'{}"]', False),
        (b'["' + b'\\"{}' * 600_000 + b'"]', False),
        (b'["' + b'\\\\",{},"' * 200_000 + b'"]', True),
        # Numbers up to 256 are there already, others are objects of their own.
        (b"[" + b"104," * 400_000 + b"1]", False),
        (b"[" + b"30000," * 140_000 + b"1]", False),
        (b"[" + b"30000," * 300_000 + b"1]", True),
        # Longer texts of the same number of values may cost more.
        (b"[" + b"300000, " * 300_000 + b"1]", False),
        (b"[" + b"-6," * 500_000 + b"1]", True),
        (b"[" + b"1.5," * 500_000 + b"1]", True),
        # Small ones may be anything.
        (b"[" + b"{}," * 9_000 + b"{}]", False),
    ],
    ids=range(11),
)
def test_json_of_too_many_parts_is_refused(text: bytes, is_refused: bool) -> None:
    assert is_too_costly(text) is is_refused
