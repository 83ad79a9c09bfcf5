"""The results of prompts have bounds, for any number and length of prompts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.api.errors import RequestError
from text_generation_router.api.openai import answers
from text_generation_router.api.openai.answers import PromptEntries
from text_generation_router.validation import GenerateParameters

from router.tests.serving import Server, serve

PATH = "/v1/completions"


def test_entries_are_counted_over_prompts_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_PROMPT_ENTRIES", 120)
    asked = GenerateParameters(inputs="", decoder_input_details=True, top_n_tokens=2)
    entries = PromptEntries(asked, 2, "logprobs")
    entries.add(10)
    entries.add(10)
    with pytest.raises(RequestError, match=r"at least 126 log-prob.*can have 120: send fewer"):
        entries.add(1)
    none = PromptEntries(GenerateParameters(inputs="", top_n_tokens=2), 128, "logprobs")
    none.add(10**9)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path, "héllo ") as server:
        yield server


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt_logprobs": 9, "n": 5}, "prompt_logprobs"),
        ({"prompt_logprobs": 9, "prompt": ["x" * 19] * 5}, "prompt_logprobs"),
        ({"logprobs": 4, "echo": True, "n": 10}, "logprobs"),
    ],
)
async def test_more_entries_than_one_answer_can_have(
    server: Server, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], param: str
) -> None:
    # The prompt has 20 tokens.
    monkeypatch.setattr(answers, "MOST_PROMPT_ENTRIES", 999)
    body = {"prompt": "x" * 19, "max_tokens": 4000} | given
    response = await server.client.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and "at least 1000 log-probabilities" in error["message"]
    await server.settle()
    assert server.services.infer.free_permits == server.services.config.max_concurrent_requests
    monkeypatch.setattr(answers, "MOST_PROMPT_ENTRIES", 1000)
    response = await server.client.post(PATH, json=body | {"max_tokens": 2})
    assert response.status_code == 200, response.text


async def test_cut_ids_are_echoed(server: Server) -> None:
    ids = [*range(60, 70)] * 450
    body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
    assert (await server.client.post(PATH, json=body)).status_code == 400
    response = await server.client.post(PATH, json=body | {"truncate_prompt_tokens": 20})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert len(choice["text"]) == len(ids) + 1
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [*range(len(ids) - 20, len(ids) + 1)]
