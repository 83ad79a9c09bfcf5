"""POST /v1/completions on a running server."""

from typing import Any

import httpx
import pytest

from router.tests.api.openai.test_chat import chunks
from router.tests.serving import BOS_ID, EOS_ID, Server, script_of, serve, shared_server

PATH = "/v1/completions"
Json = dict[str, Any]


running, server = shared_server(serve, "hé! ", model_id="org/model")


async def post(server: Server, **body: Any) -> httpx.Response:
    return await server.client.post(PATH, json={"prompt": "ab"} | body)


async def test_logprobs(server: Server) -> None:
    body = {"max_tokens": 4, "logprobs": 1, "echo": True, "stop": "!"}
    choice = (await post(server, **body)).json()["choices"][0]
    assert choice["text"] == "abhé"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "h", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.25, -0.25, -0.1, -0.2, -0.3],
        "top_logprobs": [
            {"!": -0.5, "a": -0.25},
            {"!": -0.5, "b": -0.25},
            {"!": -0.5, "h": -0.1},
            {"!": -0.5, "bytes:\\xc3": -0.2},
            {"!": -0.5, "bytes:\\xa9": -0.3},
        ],
        "text_offset": [0, 1, 2, 3, 3],
    }
    ids = [BOS_ID, *script_of("ab")]
    choice = (await post(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True)).json()
    tops = choice["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [None, {"!": -0.5, "a": -0.25}, {"!": -0.5, "b": -0.25}, {"!": -0.5, "h": -0.1}]
    choice = (await post(server, prompt=[BOS_ID], max_tokens=1, logprobs=0, echo=True)).json()
    assert choice["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.1]
    assert choice["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_behind_an_echoed_prompt_the_end_token_is_told(server: Server) -> None:
    server.shards.script = [EOS_ID]
    body = {"max_tokens": 1, "logprobs": 1, "echo": True}
    choice = (await post(server, **body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [-0.25, -0.25, -0.1]
    assert (logprobs["tokens"][:2], len(logprobs["top_logprobs"])) == (["a", "b"], 3)
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_streamed_logprobs_are_those_of_the_answer(server: Server) -> None:
    body = {"max_tokens": 9, "logprobs": 2, "stop": ["! hx"]}
    whole = (await post(server, **body)).json()["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in chunks(await post(server, **body, stream=True))]
    for key, values in whole.items():
        assert [value for part in parts if part for value in part[key]] == values


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": [[]]}, "prompt", "cannot be empty"),
        ({"prompt": ["a", 1]}, "prompt.1", "string"),
        ({"prompt": [2**32 - 1]}, "prompt", "vocabulary"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 128, "prompt": ["a", "b"]}, "n", "at most 128"),
        ({"best_of": 65, "n": 65, "prompt": ["a", "b"]}, "best_of", "at most 128"),
        ({"best_of": 2, "stream": True}, "best_of", "`stream`"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"logprobs": 1, "echo": True, "stream": True}, "logprobs", "streamed"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "token ids below 258"),
        ({"stop": ["a"] * 5}, "stop", "up to 4"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"seed": 2**64}, "seed", "integer"),
    ],
)
async def test_refused(server: Server, body: Json, param: str, words: str) -> None:
    for stream in (False, True):
        response = await post(server, **({"stream": stream} | body))
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]
