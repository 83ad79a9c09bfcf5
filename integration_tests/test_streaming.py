"""POST /generate_stream: the bytes on the wire, and that a stream says what /generate says."""

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from integration_tests.server import LauncherHandle, token_ids

PROMPT = "what is the time, and where is the sun? "
LONG: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos_token": True}


def test_bytes_of_a_stream(server: LauncherHandle) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "ignore_eos_token": True}}
    with server.client.stream("POST", "/generate_stream", json=body) as response:
        content = response.read()
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-characters"] == str(len(PROMPT))
    *events, end = content.split(b"\n\n")
    assert end == b""
    assert len(events) == 3
    for number, event in enumerate(events, start=1):
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        payload = json.loads(event.removeprefix(b"data: "))
        assert list(payload) == ["index", "token", "generated_text", "details"]
        assert list(payload["token"]) == ["id", "text", "logprob", "special"]
        assert payload["index"] == number
        assert payload["details"] is None
        assert (payload["generated_text"] is None) == (number < 3)


@pytest.mark.parametrize("parameters", [{}, {"do_sample": True, "seed": 11}], ids=str)
def test_stream_equals_whole_answer(server: LauncherHandle, parameters: dict[str, Any]) -> None:
    events = server.stream(PROMPT, **LONG, **parameters)
    answer = server.generate(PROMPT, **LONG, **parameters)
    assert token_ids(events) == token_ids(answer)
    assert events[-1]["generated_text"] == answer["generated_text"]
    details = events[-1]["details"]
    assert details["generated_tokens"] == 60
    assert details["finish_reason"] == "length"
    assert details["seed"] == answer["details"]["seed"]
    assert details["input_length"] == len(
        server.client.post("/tokenize", json={"inputs": PROMPT}).json()
    )


def test_texts_add_up_to_the_decoded_ids(server: LauncherHandle, tiny_model_path: Any) -> None:
    """A random model writes bytes that are no UTF-8; nothing may be lost or said twice."""
    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    for seed in range(8):
        events = server.stream(PROMPT, do_sample=True, temperature=1.5, seed=seed, **LONG)
        said = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
        assert said == events[-1]["generated_text"]
        whole = tokenizer.decode(
            tokenizer.encode(PROMPT).ids + token_ids(events), skip_special_tokens=True
        )
        assert PROMPT + said == whole


def test_stop_string_in_a_stream(server: LauncherHandle) -> None:
    whole = server.stream(PROMPT, **LONG)
    texts = [event["token"]["text"] for event in whole]
    # The end of one token and the beginning of the next: a stop that no token has by itself.
    place = next(
        index
        for index, (one, two) in enumerate(pairwise(texts))
        if one.strip().isascii() and two.strip().isascii() and one.strip() and two.strip()
    )
    stop = texts[place][-1] + texts[place + 1][0]
    events = server.stream(PROMPT, stop=[stop], **LONG)
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["generated_text"].endswith(stop)
    said = "".join(event["token"]["text"] for event in events)
    assert said == events[-1]["generated_text"]
    assert len(events) <= place + 2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ],
)
def test_refusals_are_events(
    server: LauncherHandle, parameters: dict[str, Any], message: str
) -> None:
    (event,) = server.stream(PROMPT, **parameters)
    assert event == {"error": f"Input validation error: {message}", "error_type": "validation"}


def test_root_streams_too(server: LauncherHandle) -> None:
    body = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 2}}
    response = server.client.post("/", json=body)
    assert response.headers["content-type"] == "text/event-stream"
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["generated_text"].startswith(PROMPT)
