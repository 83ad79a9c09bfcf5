"""A damaged checkpoint whose scores are NaN: each affected request fails with a typed error, and is
counted and logged; other rows and the server continue."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from integration_tests.checkpoints import damage
from integration_tests.hostile.contained import contained
from integration_tests.server import LauncherHandle, token_ids

SECRET = "the cat sat"
"""Of every prompt here; must not be in the log."""
SENTENCE = "the model's scores for the next token are not numbers (NaN or infinite)"
FAILURES = 'tgi_request_failure{err="generation"}'
CHAT = {"model": "tgi", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
COMPLETION = {"model": "tgi", "prompt": SECRET, "max_tokens": 4}
RESPONSE = {"model": "tgi", "input": SECRET, "max_output_tokens": 4}
GENERATE = {"inputs": SECRET, "parameters": {"max_new_tokens": 4}}
INFER = "/v2/models/x/versions/1/infer"
INPUT = {"name": "text", "shape": [1], "datatype": "UINT8", "data": list(SECRET.encode())}
BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/", GENERATE, 1),
    ("/", GENERATE | {"stream": True}, 1),
    ("/generate", GENERATE, 1),
    ("/generate", {"inputs": SECRET, "parameters": {"best_of": 2, "do_sample": True}}, 2),
    ("/generate", {"inputs": SECRET, "parameters": {"decoder_input_details": True}}, 1),
    ("/generate_stream", GENERATE, 1),
    ("/invocations", CHAT, 1),
    ("/v1/chat/completions", CHAT, 1),
    ("/v1/chat/completions", CHAT | {"stream": True}, 1),
    ("/v1/completions", COMPLETION, 1),
    ("/v1/completions", COMPLETION | {"stream": True}, 1),
    ("/v1/responses", RESPONSE, 1),
    ("/v1/responses", RESPONSE | {"stream": True}, 1),
    ("/v1/messages", CHAT, 1),
    ("/v1/messages", CHAT | {"stream": True}, 1),
    ("/vertex", {"instances": [CHAT]}, 1),
    (INFER, {"id": "1", "inputs": [INPUT], "outputs": [{"name": "text"}]}, 1),
]


@pytest.fixture(scope="module")
def nothing_but_nan(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LauncherHandle]:
    """A server of a model that never gives a score."""
    folder = tmp_path_factory.mktemp("nan") / "model"
    with contained(damage(checkpoint("llama3-untied"), folder, "model.norm.weight", None)) as it:
        yield it


def errors_in(response: httpx.Response) -> list[dict[str, Any]]:
    """What says `error` in an answer: of a body, or of the events of a stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    data = [line[5:] for line in response.text.splitlines() if line.startswith("data:")]
    events = [json.loads(item) for item in data if item.strip() != "[DONE]"]
    return [event for event in events if "error" in json.dumps(event)]


@pytest.mark.parametrize(("path", "body", "count"), BODIES, ids=lambda item: str(item)[:40])
def test_every_route_says_so(
    nothing_but_nan: LauncherHandle, path: str, body: dict[str, Any], count: int
) -> None:
    """A status or, in a stream that has begun, the last event; with no token before it."""
    before = nothing_but_nan.metrics()
    response = nothing_but_nan.client.post(path, json=body)
    errors = errors_in(response)
    # OpenAI's and Anthropic's routes know no 424.
    refusals = (500,) if path.startswith("/v1/") else (424,)
    is_stream = "event-stream" in response.headers["content-type"]
    assert response.status_code in ((200, *refusals) if is_stream else refusals), response.text
    assert errors and SENTENCE in json.dumps(errors[-1]), response.text
    after = nothing_but_nan.metrics()
    assert after[FAILURES] == before.get(FAILURES, 0) + count
    assert after["tgi_request_success"] == before["tgi_request_success"]
    assert nothing_but_nan.client.get("/health").status_code == 200
    nothing_but_nan.assert_idle()


def test_the_type_is_tgis(nothing_but_nan: LauncherHandle) -> None:
    response = nothing_but_nan.client.post("/generate", json=GENERATE)
    assert response.status_code == 424
    assert response.json() == {
        "error": f"Request failed during generation: {SENTENCE}",
        "error_type": "generation",
    }


def test_the_log_says_it_without_the_prompt(nothing_but_nan: LauncherHandle) -> None:
    nothing_but_nan.client.post("/generate", json=GENERATE)
    warnings = [line for line in nothing_but_nan.log.splitlines() if " WARN" in line]
    assert any(f"1 of 1 requests failed in this step: {SENTENCE}" in item for item in warnings)
    assert any(SENTENCE in item for item in nothing_but_nan.log.splitlines() if " ERROR " in item)
    assert SECRET not in nothing_but_nan.log


@pytest.fixture(scope="module")
def one_bad_token(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LauncherHandle, int, str]]:
    """A server of a model in which one token's embedding is NaN; that token, and its text."""
    source = checkpoint("llama3-untied")
    text = "~"
    (bad,) = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids
    folder = tmp_path_factory.mktemp("bad") / "model"
    damaged = damage(source, folder, "model.embed_tokens.weight", bad)
    flags = ("--dtype", "bfloat16", "--speculate", "3", "--max-batch-prefill-tokens", "64")
    with contained(damaged, *flags) as handle:
        yield handle, bad, text


async def _together(handle: LauncherHandle, bad_id: int, bad: str) -> list[httpx.Response]:
    """8 honest requests, between them 8 that end in the bad token, some in several parts."""
    async with handle.async_client() as client:
        calls = []
        for number in range(8):
            body = _honest(number, bad_id)
            calls.append(client.post("/generate", json=body))
            wrong = body | {"inputs": body["inputs"] + " and the dog" * number * 4 + bad}
            calls.append(client.post("/generate", json=wrong))
        return await asyncio.gather(*calls)


def _honest(number: int, bad: int) -> dict[str, Any]:
    sampling = {"do_sample": True, "seed": number, "temperature": 1.2} if number % 2 else {}
    parameters = {"max_new_tokens": 40, "ignore_eos_token": True, "details": True, **sampling}
    parameters["logit_bias"] = {str(bad): -100}
    return {"inputs": f"{SECRET} {number}", "parameters": parameters}


def test_only_the_requests_with_the_bad_token_fail(
    one_bad_token: tuple[LauncherHandle, int, str],
) -> None:
    """Tokens and log-probabilities of other rows are bit for bit the same as alone."""
    handle, bad, text = one_bad_token
    alone = [handle.client.post("/generate", json=_honest(n, bad)).json() for n in range(8)]
    for _ in range(3):
        answers = asyncio.run(_together(handle, bad, text))
        for number, wanted in enumerate(alone):
            assert answers[2 * number].status_code == 200, answers[2 * number].text
            answer = answers[2 * number].json()
            assert token_ids(answer) == token_ids(wanted)
            assert answer["details"]["tokens"] == wanted["details"]["tokens"]
            assert answers[2 * number + 1].status_code == 424
            assert answers[2 * number + 1].json()["error_type"] == "generation"
    handle.assert_idle()


def test_a_stream_that_comes_upon_it_ends_with_an_error(
    one_bad_token: tuple[LauncherHandle, int, str],
) -> None:
    handle, bad, text = one_bad_token
    body = COMPLETION | {"stream": True, "logit_bias": {str(bad): 100}}
    before = handle.metrics()
    response = handle.client.post("/v1/completions", json=body)
    assert response.status_code == 200
    data = [line[5:].strip() for line in response.text.splitlines() if line.startswith("data:")]
    events = [json.loads(item) for item in data if item != "[DONE]"]
    assert events[0]["choices"][0]["text"] == text
    assert SENTENCE in events[-1]["error"]["message"]
    assert len(events) == 2
    assert handle.metrics()[FAILURES] == before.get(FAILURES, 0) + 1
    handle.assert_idle()
