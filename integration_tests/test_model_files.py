"""A model whose files beside the weights say different things, as published ones do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, write_checkpoint
from integration_tests.server import LauncherHandle, running, wait_until

END_ID = SPECIAL_TOKENS.index("<|im_end|>")
BOS_ID = SPECIAL_TOKENS.index("<|im_start|>")
MORE = "<|more|>"


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherHandle]:
    """The end token and the first token are named by tokenizer_config.json only; its template is
    empty, and tokenizer.json has a token more than the model."""
    path = write_checkpoint("llama3", tmp_path_factory.mktemp("files") / "model")
    edit(path / "generation_config.json", eos_token_id=[])
    edit(path / "config.json", eos_token_id=None, tie_word_embeddings=True)
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": ""}
    edit(path / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", **settings)
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    added.append(added[-1] | {"id": VOCAB_SIZE, "content": MORE})
    edit(path / "tokenizer.json", added_tokens=added)
    with running(path, "--dtype", "float32") as server:
        yield server


def generate(handle: LauncherHandle, **parameters: Any) -> dict[str, Any]:
    given = {"max_new_tokens": 8, "details": True, **parameters}
    answer = handle.client.post("/generate", json={"inputs": "the cat", "parameters": given})
    assert answer.status_code == 200, answer.text
    details: dict[str, Any] = answer.json()["details"]
    return details


def test_a_text_ends_at_the_tokenizers_end_token(handle: LauncherHandle) -> None:
    bias = {"logit_bias": {str(END_ID): 100}}
    assert generate(handle, **bias)["finish_reason"] == "eos_token"
    late = generate(handle, **bias, min_new_tokens=4)
    assert (late["finish_reason"], late["generated_tokens"]) == ("eos_token", 5)
    ignored = generate(handle, **bias, ignore_eos_token=True)
    assert (ignored["finish_reason"], ignored["generated_tokens"]) == ("length", 8)


def test_a_grammar_ends_at_the_tokenizers_end_token(handle: LauncherHandle) -> None:
    details = generate(handle, grammar={"type": "regex", "value": "a"})
    assert details["tokens"][-1]["id"] == END_ID
    assert details["finish_reason"] == "eos_token"


def test_every_route_puts_the_first_token_in_front(handle: LauncherHandle) -> None:
    prefill = generate(handle, decoder_input_details=True)["prefill"]
    assert [token["id"] for token in prefill].count(BOS_ID) == 1
    assert prefill[0]["id"] == BOS_ID
    tokens = handle.client.post("/tokenize", json={"inputs": "the cat"}).json()
    assert [token["id"] for token in tokens] == [token["id"] for token in prefill]
    for route, text in (
        ("completions", {"prompt": "the cat"}),
        ("embeddings", {"input": "the cat"}),
    ):
        answer = handle.client.post(f"/v1/{route}", json={"model": "x", "max_tokens": 1, **text})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(prefill)


def test_an_empty_chat_template_is_none(handle: LauncherHandle) -> None:
    chat = {"model": "x", "messages": [{"role": "user", "content": "hello"}]}
    answer = handle.client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert "the model has no chat template" in answer.text
    said = "Template error: the model has no chat template"
    wait_until(lambda: said in handle.log, 5, "the log says it")


def test_a_token_that_only_the_tokenizer_has_is_refused(handle: LauncherHandle) -> None:
    assert f"token ids up to {VOCAB_SIZE}, the model only up to {VOCAB_SIZE - 1}" in handle.log
    answer = handle.client.post("/generate", json={"inputs": f"the {MORE} cat"})
    assert answer.status_code == 422
    assert f"the token '{MORE}', which this model does not have" in answer.json()["error"]
    handle.assert_idle()
