"""POST /generate and /generate_stream: the bytes on the wire, what each parameter does, and that a
stream says what a whole answer says. The transcripts have all routes.
"""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from integration_tests.checkpoints import VOCAB_SIZE
from integration_tests.server import LauncherHandle, token_ids

PROMPT = "the cat sat on the mat and "
LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos_token": True}


def test_details_and_headers(server: LauncherHandle) -> None:
    parameters = {"details": True, "decoder_input_details": True, "max_new_tokens": 6}
    response = server.client.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
    answer = response.json()
    details = answer["details"]
    assert details["finish_reason"] in ("length", "eos_token")
    assert details["generated_tokens"] == len(details["tokens"]) <= 6
    assert details["seed"] is None
    assert "".join(token["text"] for token in details["prefill"]) == PROMPT
    assert all(token["logprob"] <= 0 for token in details["tokens"])
    said = "".join(token["text"] for token in details["tokens"] if not token["special"])
    assert said == answer["generated_text"]
    assert response.headers["x-prompt-tokens"] == str(len(details["prefill"]))
    assert response.headers["x-generated-tokens"] == str(details["generated_tokens"])
    assert response.headers["x-compute-characters"] == str(len(PROMPT))
    assert float(response.headers["x-compute-time"]) > 0
    for name in ("total", "validation", "queue", "inference"):
        assert int(response.headers[f"x-{name}-time"]) >= 0


def test_absent_parameters_sample_and_empty_ones_do_not(server: LauncherHandle) -> None:
    def ask(body: dict[str, Any]) -> str:
        response = server.client.post("/generate", json={"inputs": PROMPT, **body})
        return str(response.json()["generated_text"])

    greedy = {ask({"parameters": {"max_new_tokens": 30}}) for _ in range(3)}
    assert len(greedy) == 1
    assert len({ask({"parameters": {"do_sample": True, **LONG}}) for _ in range(3)}) > 1
    assert ask({}) != ask({})


def test_seed_decides_a_sample(server: LauncherHandle) -> None:
    first, second = (server.generate(PROMPT, do_sample=True, seed=3, **LONG) for _ in range(2))
    other = server.generate(PROMPT, do_sample=True, seed=4, **LONG)
    assert first["details"]["seed"] == 3
    assert token_ids(first) == token_ids(second) != token_ids(other)


def test_best_of_returns_the_likelier_one_first(server: LauncherHandle) -> None:
    details = server.generate(PROMPT, do_sample=True, best_of=2, **LONG)["details"]
    (loser,) = details["best_of_sequences"]

    def mean(sequence: dict[str, Any]) -> float:
        logprobs = [token["logprob"] for token in sequence["tokens"]]
        return float(sum(logprobs) / len(logprobs))

    assert mean(details) >= mean(loser)
    assert token_ids({"details": details}) != token_ids({"details": loser})


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 3.0, "seed": 1},
        {"top_k": 200, "seed": 1, "temperature": 2.0},
        {"top_p": 0.9999, "seed": 1},
        {"typical_p": 0.5, "seed": 1},
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"watermark": True},
        {"logit_bias": {str(VOCAB_SIZE - 1): 50.0}},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_no_parameter_is_ignored(server: LauncherHandle, parameters: dict[str, Any]) -> None:
    plain = server.generate(PROMPT, **LONG)
    shaped = server.generate(PROMPT, **LONG, **parameters)
    again = server.generate(PROMPT, **LONG, **parameters)
    assert token_ids(shaped) == token_ids(again) != token_ids(plain)


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
    assert details["generated_tokens"] == LONG["max_new_tokens"]
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
