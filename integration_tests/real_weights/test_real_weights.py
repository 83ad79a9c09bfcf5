"""Checkpoints that people have, from packages, against transformers in float32."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests.oracle import Oracle
from integration_tests.server import LauncherHandle, running, token_ids

WEIGHTS = Path(__file__).parents[2] / ".venv-weights"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of 100 degrees, and it freezes at",
)
NEW_TOKENS = 24
FLAGS = {
    "float32": ("--dtype", "float32"),
    "int8": ("--quantize", "int8"),
    "int4": ("--quantize", "int4"),
}
# Of 96 tokens, those before the first other one of each answer. int8 has 68 and int4 71 of SmolLM2.
LEAST_EQUAL = {"float32": 96, "int8": 48, "int4": 48}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def checkpoint(name: str) -> Path:
    """Where make has put a converted checkpoint."""
    if not (WEIGHTS / name / ".installed").exists():
        pytest.fail(f"the weights are missing: run `make .venv-weights/{name}/.installed`")
    return WEIGHTS / name / "checkpoint"


def num_equal(answer: list[int], expected: list[int]) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(answer, expected, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(answer), len(expected)))


@pytest.fixture(scope="module")
def smollm2_answers() -> list[list[int]]:
    """What transformers says to each of PROMPTS."""
    oracle = Oracle(checkpoint("smollm2"))
    return [oracle.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=FLAGS)
def smollm2(request: pytest.FixtureRequest) -> Iterator[LauncherHandle]:
    with running(checkpoint("smollm2"), *FLAGS[request.param]) as handle:
        yield handle
        handle.assert_idle()


def chat(server: LauncherHandle, text: str, **fields: Any) -> dict[str, Any]:
    """The message of the answer."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 40, **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def test_tokens_are_those_of_transformers(
    smollm2: LauncherHandle, smollm2_answers: list[list[int]], request: pytest.FixtureRequest
) -> None:
    answers = [token_ids(smollm2.generate(one, max_new_tokens=NEW_TOKENS)) for one in PROMPTS]
    equal = map(num_equal, answers, smollm2_answers)
    assert sum(equal) >= LEAST_EQUAL[request.node.callspec.params["smollm2"]], answers


def test_a_chat_is_answered_with_what_is_known(smollm2: LauncherHandle) -> None:
    assert chat(smollm2, "What is the capital of France?")["content"] == (
        "The capital of France is Paris."
    )
    colors = chat(smollm2, "What are the primary colors?")["content"].lower()
    assert all(color in colors for color in ("red", "blue", "yellow")), colors


def test_a_tool_is_called_with_valid_arguments(smollm2: LauncherHandle) -> None:
    question = "What is the weather like in Paris?"
    [call] = chat(smollm2, question, tools=[WEATHER], tool_choice="required")["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
