"""The served tokens are those of `transformers`, regardless of batch composition."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration_tests.checkpoints import FAMILIES
from integration_tests.oracle import Oracle, ragged_prompts
from integration_tests.server import LauncherHandle, running, stream_events, token_ids, wait_until
from integration_tests.together import new_tokens_of, serve_together

# The shard's own tests compare every family; a whole server adds a tokenizer, which may put a first
# token in front, and limits, which may end at a window.
SERVED = ("llama2", "llama3", "mistral")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=() if family in SERVED else pytest.mark.nightly)
        for family in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    """Each supported family in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def family_server(family: str, checkpoint: Callable[[str], Path]) -> Iterator[LauncherHandle]:
    """A server of that family's tiny checkpoint in float32."""
    flags = ("--dtype", "float32", *FAMILIES[family].flags)
    with running(checkpoint(family), *flags) as handle:
        yield handle


async def test_greedy_equals_transformers(
    family: str, family_server: LauncherHandle, checkpoint: Callable[[str], Path]
) -> None:
    oracle = Oracle(checkpoint(family), family)
    prompts = ragged_prompts(checkpoint(family))
    streams = await serve_together(family_server, prompts)
    served = {prompts[index]: token_ids(events) for index, events in streams.items()}
    expected = {
        prompt: oracle.greedy(prompt, new_tokens_of(index)) for index, prompt in enumerate(prompts)
    }
    assert served == expected
    family_server.assert_idle()


async def test_prompt_logprobs_equal_transformers(
    family: str, family_server: LauncherHandle, checkpoint: Callable[[str], Path]
) -> None:
    oracle = Oracle(checkpoint(family), family)
    prompts = ragged_prompts(checkpoint(family))
    async with family_server.async_client() as client:
        answers = await asyncio.gather(*(_ask_logprobs(client, prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        prefill = answer["details"]["prefill"]
        ids = [token["id"] for token in prefill]
        assert ids == oracle.encode(prompt)
        assert prefill[0]["logprob"] is None
        served = [token["logprob"] for token in prefill[1:]]
        assert served == pytest.approx(oracle.logprobs(ids), abs=1e-4)
    family_server.assert_idle()


async def _ask_logprobs(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    parameters = {"decoder_input_details": True, "details": True, "max_new_tokens": 1}
    response = await client.post("/generate", json={"inputs": prompt, "parameters": parameters})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_token_logprobs_equal_transformers(server: LauncherHandle, tiny_model_path: Path) -> None:
    oracle = Oracle(tiny_model_path, "llama3")
    prompt = "the cat sat on "
    answer = server.generate(prompt, max_new_tokens=12, ignore_eos_token=True)
    prompt_ids = oracle.encode(prompt)
    expected = oracle.logprobs([*prompt_ids, *token_ids(answer)])[len(prompt_ids) - 1 :]
    served = [token["logprob"] for token in answer["details"]["tokens"]]
    assert served == pytest.approx(expected, abs=1e-4)


# The same request alone, among 32, and after having lost its blocks.

GREEDY: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos_token": True}
SAMPLED: dict[str, Any] = {
    **GREEDY,
    "seed": 7,
    "temperature": 0.9,
    "top_k": 60,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
}
PROMPT = "where is the sun and what is the time? "


async def among_others(
    server: LauncherHandle, parameters: dict[str, Any], batch_size: int
) -> list[int]:
    """The prompt's tokens beside others of other lengths. All are there before a step ends, and one
    step at least has all of them."""
    prompts = [f"{index} dogs and " * (1 + index % 5) for index in range(batch_size)]
    prompts[batch_size // 2] = PROMPT
    before = num_steps(server)
    shard = server.child("text-generation-server")
    async with server.async_client() as client:
        shard.suspend()
        try:
            answers = [
                asyncio.create_task(_stream_ids(client, prompt, parameters)) for prompt in prompts
            ]
            await asyncio.to_thread(
                wait_until, lambda: num_requests(server) == batch_size, 4, "all requests are there"
            )
        finally:
            shard.resume()
        tokens = await asyncio.gather(*answers)
    assert all(len(each) == parameters["max_new_tokens"] for each in tokens)
    # A request takes `max_new_tokens` consecutive steps: with fewer than twice as many in all, some
    # step has every request.
    assert num_steps(server) - before < 2 * parameters["max_new_tokens"]
    return tokens[batch_size // 2]


def num_requests(server: LauncherHandle) -> float:
    """Those that wait and those that run."""
    metrics = server.metrics()
    return metrics["tgi_queue_size"] + metrics["tgi_batch_current_size"]


def num_steps(server: LauncherHandle) -> float:
    """All steps so far."""
    metrics = server.metrics().items()
    return sum(count for name, count in metrics if name.startswith("tgi_batch_inference_count"))


@pytest.mark.parametrize("parameters", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_same_tokens_alone_and_in_a_batch_of_32(
    server: LauncherHandle, parameters: dict[str, Any]
) -> None:
    alone = await asyncio.to_thread(server.generate, PROMPT, **parameters)
    batched = await among_others(server, parameters, 32)
    assert batched == token_ids(alone)
    assert len(set(batched)) > 20


@pytest.mark.parametrize("parameters", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_same_tokens_after_a_preemption(
    server: LauncherHandle, cramped: LauncherHandle, parameters: dict[str, Any]
) -> None:
    alone = await asyncio.to_thread(server.generate, PROMPT, **parameters)
    before = cramped.metrics()["tgi_request_preempted"]
    prompts = [PROMPT] * 12
    async with cramped.async_client() as client:
        answers = await asyncio.gather(
            *(_stream_ids(client, prompt, parameters) for prompt in prompts)
        )
    assert cramped.metrics()["tgi_request_preempted"] > before
    assert answers == [token_ids(alone)] * len(prompts)


async def _stream_ids(
    client: httpx.AsyncClient, inputs: str, parameters: dict[str, Any]
) -> list[int]:
    return token_ids([event async for event in stream_events(client, inputs, **parameters)])
