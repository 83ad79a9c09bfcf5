"""What the scheduler does to be fast changes no token, with the real shard in float32."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, stream_events, token_ids

WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "in", "rain", "time", "sun", "add"]


def text(num_words: int, seed: int) -> str:
    """Words in a random order."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


async def ask_all(server: LauncherHandle, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The answers to concurrent requests."""
    async with server.async_client() as client:

        async def ask(inputs: str, parameters: dict[str, Any]) -> Any:
            body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
            response = await client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        return await asyncio.gather(*(ask(*one) for one in asked))


def test_a_prompt_from_the_cache_has_the_same_tokens(server: LauncherHandle) -> None:
    prompt = text(50, seed=1)
    asked = {"max_new_tokens": 30, "ignore_eos_token": True}
    cold = server.generate(prompt, **asked)
    hits = server.metrics()["tgi_prefix_cache_hit_tokens"]
    warm = server.generate(prompt, **asked)
    assert token_ids(warm) == token_ids(cold)
    assert server.metrics()["tgi_prefix_cache_hit_tokens"] >= hits + 32
    # Drawn tokens as well, and the log-probabilities of the prompt, which need all of it.
    drawn = {**asked, "do_sample": True, "seed": 7}
    assert token_ids(server.generate(prompt, **drawn)) == token_ids(
        server.generate(prompt, **drawn, decoder_input_details=True)
    )


def test_a_conversation_goes_on_from_the_cache(
    server: LauncherHandle, tiny_model_path: Path, launch: Launch
) -> None:
    """The answer is part of the next prompt; a server without the cache writes the same."""
    without = launch(tiny_model_path, "--dtype", "float32", PREFIX_CACHING="false")
    without.wait_until_ready()
    history = text(20, seed=2)
    for turn in range(3):
        asked = {"max_new_tokens": 24, "ignore_eos_token": True}
        hits = server.metrics()["tgi_prefix_cache_hit_tokens"]
        answer = server.generate(history, **asked)
        assert token_ids(answer) == token_ids(without.generate(history, **asked))
        if turn:
            assert server.metrics()["tgi_prefix_cache_hit_tokens"] > hits
        history += answer["generated_text"] + text(5, seed=turn)
    assert without.metrics()["tgi_prefix_cache_hit_tokens"] == 0
    assert without.metrics()["tgi_prefix_cache_blocks"] == 0
    features = without.client.get("/info").json()["features"]
    assert features["prefix_caching"] == "off: --disable-prefix-caching was given"
    assert features["prefill_chunking"] == "on"
    without.assert_idle()
    without.stop()


def test_64_requests_with_little_memory(server: LauncherHandle, cramped: LauncherHandle) -> None:
    """Each writes what it writes with room for all, and alone, though many are preempted."""
    choose = random.Random(3)
    asked = [
        (
            text(choose.randint(1, 30), seed),
            {
                "max_new_tokens": choose.randint(60, 160),
                "ignore_eos_token": True,
                "do_sample": bool(seed % 2),
                "seed": seed,
            },
        )
        for seed in range(64)
    ]
    roomy = asyncio.run(ask_all(server, asked))
    for (inputs, parameters), answer in list(zip(asked, roomy, strict=True))[::12]:
        assert token_ids(server.generate(inputs, **parameters)) == token_ids(answer)
    preempted = cramped.metrics()["tgi_request_preempted"]
    together = asyncio.run(ask_all(cramped, asked))
    for ours, theirs in zip(together, roomy, strict=True):
        assert token_ids(ours) == token_ids(theirs)
    assert cramped.metrics()["tgi_request_preempted"] > preempted
    refused = cramped.client.post(
        "/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 4000}}
    )
    assert refused.status_code == 422 and "4000 `max_new_tokens`" in refused.text


async def _tokens_of_others_meanwhile(server: LauncherHandle, prompt: str) -> tuple[int, Any]:
    """How many tokens a stream gets from the moment a long prompt is sent to its first token."""
    num_tokens = 0
    async with server.async_client() as client:

        async def count() -> None:
            nonlocal num_tokens
            parameters = {"max_new_tokens": 400, "ignore_eos_token": True}
            async for _ in stream_events(client, "the cat", **parameters):
                num_tokens += 1

        counting = asyncio.create_task(count())
        while num_tokens < 5:
            await asyncio.sleep(0.005)
        before = num_tokens
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 1, "details": True}}
        answer = (await client.post("/generate", json=body)).json()
        meanwhile = num_tokens - before
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        return meanwhile, answer


def test_a_long_prompt_does_not_stop_the_others(tiny_model_path: Path, launch: Launch) -> None:
    """A step computes a block of it at most, and a token of the stream."""
    flags = ("--inter-token-latency-target-ms", "1", "--max-batch-prefill-tokens", "16")
    server = launch(tiny_model_path, "--dtype", "float32", *flags)
    server.wait_until_ready()
    prompt = text(130, seed=4)
    num_blocks = len(server.client.post("/tokenize", json={"inputs": prompt}).json()) // 16
    assert num_blocks > 12
    meanwhile, answer = asyncio.run(_tokens_of_others_meanwhile(server, prompt))
    # In one piece it would be one token, or two.
    assert meanwhile >= num_blocks // 2
    whole = server.generate(prompt, max_new_tokens=1, decoder_input_details=True)
    assert token_ids(answer) == token_ids(whole)
    server.assert_idle()
    server.stop()


def test_drafted_tokens_are_those_that_come_anyway(
    server: LauncherHandle, tiny_model_path: Path, launch: Launch
) -> None:
    """Also where prompts are computed in parts."""
    asked: list[tuple[str, dict[str, Any]]] = [
        (f"{text(4, seed)} " * 5, {"max_new_tokens": 60, "ignore_eos_token": True})
        for seed in range(6)
    ]
    asked += [(inputs, {**rest, "do_sample": True, "seed": 5}) for inputs, rest in asked]
    asked += [(inputs, {**rest, "top_n_tokens": 2}) for inputs, rest in asked[:2]]
    asked += [(inputs, {**rest, "stop": ["the"]}) for inputs, rest in asked[:4]]
    alone = [server.generate(inputs, **parameters) for inputs, parameters in asked]
    flags = ("--speculate", "4", "--max-batch-prefill-tokens", "16")
    drafting = launch(tiny_model_path, "--dtype", "float32", *flags)
    drafting.wait_until_ready()
    for ours, theirs in zip(asyncio.run(ask_all(drafting, asked)), alone, strict=True):
        assert ours["generated_text"] == theirs["generated_text"]
        assert token_ids(ours) == token_ids(theirs)
        assert ours["details"]["finish_reason"] == theirs["details"]["finish_reason"]
    metrics = drafting.metrics()
    assert metrics["tgi_request_skipped_tokens_sum"] > 0
    features = drafting.client.get("/info").json()["features"]
    assert features["speculation"] == "on: up to 4 draft tokens per request and step"
    drafting.assert_idle()
    drafting.stop()


def test_deterministic_is_a_parameter_of_every_route(server: LauncherHandle) -> None:
    prompt = text(30, seed=6)
    first = server.generate(prompt, max_new_tokens=10, deterministic=True)
    again = server.generate(prompt, max_new_tokens=10, deterministic=True)
    assert token_ids(first) == token_ids(again)
    body = {"model": "tgi", "prompt": prompt, "max_tokens": 10, "deterministic": True}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    body = {"inputs": prompt, "parameters": {"deterministic": "perhaps"}}
    assert server.client.post("/generate", json=body).status_code == 422


def test_steps_launched_ahead_change_no_token(
    server: LauncherHandle, tiny_model_path: Path, launch: Launch
) -> None:
    """With a second core for the router, against a server that has but one. Some end early, leave,
    or stop at a word."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        without = launch(tiny_model_path, "--dtype", "float32")
    finally:
        os.sched_setaffinity(0, cores)
    without.wait_until_ready()
    said = [
        one.client.get("/info").json()["features"]["async_scheduling"] for one in (server, without)
    ]
    assert said[0] == "on" and said[1].startswith("off: the model computes on every core")
    asked = [
        (
            text(4 + seed, seed),
            {
                "max_new_tokens": 5 + 7 * (seed % 9),
                "ignore_eos_token": bool(seed % 2),
                "stop": ["e"] if seed % 5 == 0 else [],
                "do_sample": seed % 3 == 0,
                "seed": seed,
            },
        )
        for seed in range(24)
    ]
    answers = asyncio.run(ask_all(server, asked))
    assert answers == [without.generate(inputs, **parameters) for inputs, parameters in asked]
    body = {"inputs": "the cat", "parameters": {"max_new_tokens": 60, "ignore_eos_token": True}}
    with server.client.stream("POST", "/generate_stream", json=body) as stream:
        next(stream.iter_lines())
    server.assert_idle()
    without.stop()
