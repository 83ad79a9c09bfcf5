"""POST /generate and POST /: the answer's shape, what each parameter does, what the limits are."""

from typing import Any

import pytest

from integration_tests.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE
from integration_tests.server import LauncherHandle, token_ids

PROMPT = "the cat sat on the mat and "
LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos_token": True}


def test_answer_without_details_is_the_text_alone(server: LauncherHandle) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["generated_text"]


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


def test_root_answers_a_list_with_the_full_text(server: LauncherHandle) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}
    (answer,) = server.client.post("/", json=body).json()
    alone = server.generate(PROMPT, max_new_tokens=4)
    assert answer["generated_text"] == PROMPT + alone["generated_text"]


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


def test_top_tokens_start_with_the_chosen_one(server: LauncherHandle) -> None:
    details = server.generate(PROMPT, top_n_tokens=3, **LONG)["details"]
    assert len(details["top_tokens"]) == len(details["tokens"]) == 40
    for chosen, alternatives in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(alternatives) >= 3
        assert alternatives[0]["id"] == chosen["id"]
        logprobs = [alternative["logprob"] for alternative in alternatives]
        assert logprobs == sorted(logprobs, reverse=True)


def test_stop_string_ends_the_text_and_stays_in_it(server: LauncherHandle) -> None:
    whole = server.generate(PROMPT, **LONG)["generated_text"]
    printable = [place for place in range(8, len(whole) - 2) if whole[place : place + 2].isascii()]
    stop = whole[printable[0] : printable[0] + 2]
    answer = server.generate(PROMPT, stop=[stop], **LONG)
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["generated_text"] == whole[: whole.index(stop) + len(stop)]


def test_eos_ends_the_text_and_is_not_in_it(server: LauncherHandle) -> None:
    bias = {str(SPECIAL_TOKENS.index("<|endoftext|>")): 100.0}
    answer = server.generate(PROMPT, max_new_tokens=10, logit_bias=bias)
    (token,) = answer["details"]["tokens"]
    assert answer["details"]["finish_reason"] == "eos_token"
    assert (token["text"], token["special"]) == ("<|endoftext|>", True)
    assert answer["generated_text"] == ""


def test_min_new_tokens_keeps_eos_away(server: LauncherHandle) -> None:
    bias = {str(SPECIAL_TOKENS.index(name)): 100.0 for name in ("<|endoftext|>", "<|im_end|>")}
    answer = server.generate(PROMPT, max_new_tokens=10, min_new_tokens=4, logit_bias=bias)
    assert [token["special"] for token in answer["details"]["tokens"]] == [False] * 4 + [True]


def test_truncate_keeps_the_end_of_the_prompt(server: LauncherHandle) -> None:
    asked = {"max_new_tokens": 8, "decoder_input_details": True}
    cut = server.generate(PROMPT * 4, truncate=5, **asked)
    prefill = cut["details"]["prefill"]
    assert len(prefill) == 5
    assert PROMPT.endswith("".join(token["text"] for token in prefill))


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


def test_tokenize_gives_byte_offsets(server: LauncherHandle) -> None:
    text = "naïve 🐍 cat"
    tokens = server.client.post("/tokenize", json={"inputs": text}).json()
    assert list(tokens[0]) == ["id", "text", "start", "stop"]
    assert tokens[0]["start"] == 0
    assert tokens[-1]["stop"] == len(text.encode())
    assert tokens[-1]["text"] == text[-len(tokens[-1]["text"]) :]


def test_info_and_health(server: LauncherHandle) -> None:
    info = server.client.get("/info").json()
    assert info["model_dtype"] == "float32"
    assert info["max_input_tokens"] == 300
    assert info["max_total_tokens"] == 512
    assert info["router"] == "text-generation-router"
    for path in ("/health", "/ping", "/"):
        response = server.client.get(path)
        assert (response.status_code, response.content) == (200, b"")
