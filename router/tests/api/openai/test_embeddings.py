"""POST /v1/embeddings on top of shards that are played: shapes, limits, refusals, permits."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from router.tests.serving import BOS_ID, Server, serve, shared_server

PATH = "/v1/embeddings"


running, server = shared_server(serve, "hello ", max_concurrent_requests=8, max_input_tokens=200)


async def embed(server: Server, given: Any, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"model": "tgi", "input": given, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(server: Server, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = await server.client.post(PATH, json=body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def unit(*values: float) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


async def test_a_text_has_a_vector_of_length_one(server: Server) -> None:
    answer = await embed(server, "abc")
    assert answer["object"] == "list" and answer["model"] == server.services.config.model_names[0]
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    [found] = answer["data"]
    assert (found["object"], found["index"]) == ("embedding", 0)
    last = (await embed(server, "abc", normalize=False))["data"][0]["embedding"]
    assert last[:2] == [4, BOS_ID] and last[3] == 3
    assert found["embedding"] == pytest.approx(unit(*last))


async def test_each_form_of_input(server: Server) -> None:
    async def lengths(given: Any, **body: Any) -> list[float]:
        answer = await embed(server, given, normalize=False, **body)
        assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
        return [one["embedding"][0] for one in answer["data"]]

    assert await lengths("ab") == [3]
    assert await lengths(["ab", "c"]) == [3, 2]
    assert await lengths([5, 6, 7, 8]) == [4]
    assert await lengths([[5], [6, 7]]) == [1, 2]
    assert await lengths("ab", add_special_tokens=False) == [2]
    assert await lengths("a" * 500, truncate_prompt_tokens=7) == [7]
    assert await lengths("a" * 500, truncate_prompt_tokens=-1) == [200]


async def test_dimensions_are_cut_and_normalised_again(server: Server) -> None:
    whole = (await embed(server, "abc", normalize=False))["data"][0]["embedding"]
    cut = (await embed(server, "abc", dimensions=2))["data"][0]["embedding"]
    assert cut == pytest.approx(unit(*whole[:2]))
    error = await refusal(server, {"input": "abc", "dimensions": 5})
    assert (
        error["message"].startswith("`dimensions` must be <= 4") and error["param"] == "dimensions"
    )


async def test_many_texts_take_few_permits(tmp_path: Path) -> None:
    """Of 8 permits half; the others are for those who come meanwhile."""
    async with serve(tmp_path, max_concurrent_requests=8) as server:
        server.shards.delay_s = 0.01
        held = []

        async def watch() -> None:
            while True:
                held.append(8 - server.services.infer.free_permits)
                await asyncio.sleep(0.005)

        watcher = asyncio.create_task(watch())
        answer = await embed(server, ["ab" * place for place in range(1, 41)], normalize=False)
        watcher.cancel()
    assert [one["embedding"][0] for one in answer["data"]] == [1 + 2 * n for n in range(1, 41)]
    assert max(held) == 4
    assert answer["usage"]["prompt_tokens"] == sum(1 + 2 * n for n in range(1, 41))


async def test_a_long_answer_comes_in_pieces(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        response = await server.client.post(PATH, json={"input": ["ab"] * 2048})
        assert "content-length" in response.headers  # four numbers each
        assert len(response.json()["data"]) == 2048
        server.shards.width = 4096
        response = await server.client.post(PATH, json={"input": ["ab"] * 20})
        assert response.status_code == 200 and "content-length" not in response.headers
        assert [len(one["embedding"]) for one in response.json()["data"]] == [4096] * 20
        assert response.headers["x-prompt-tokens"] == "60"
        assert server.services.long_answers.num_taken == 0


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"input": []}, "`input`: must not be empty", "input"),
        ({"input": ["a"] * 2049}, "at most 2048 texts in one request, 2049 are given", "input"),
        ({"input": "a", "encoding_format": "hex"}, "`encoding_format`", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "must be -1", "truncate_prompt_tokens"),
        (
            {"input": "a", "truncate_prompt_tokens": 201},
            "`truncate_prompt_tokens` must be strictly positive and less than 200",
            "truncate_prompt_tokens",
        ),
    ],
)
async def test_a_bad_body_is_refused(
    server: Server, body: dict[str, Any], words: str, param: str
) -> None:
    error = await refusal(server, body)
    assert words in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_a_key_has_its_limits(tmp_path: Path) -> None:
    options = {"api_key": ("a",), "max_concurrent_requests_per_key": 2}
    async with serve(tmp_path, **options, max_tokens_per_minute_per_key=59) as server:
        headers = {"authorization": "Bearer a"}
        body = {"input": ["ab"] * 20}
        response = await server.client.post(PATH, json=body, headers=headers)
        assert response.status_code == 200, "two at a time, not twenty"
        # Its 60 prompt tokens are gone, and nothing else was taken.
        response = await server.client.post(PATH, json={"input": "a"}, headers=headers)
        assert response.status_code == 429 and "tokens a minute" in response.text
        assert int(response.headers["retry-after"]) <= 2
