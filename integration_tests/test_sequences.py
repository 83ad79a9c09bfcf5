"""Several sequences over one prompt, with the real shard: right, shared, and always ended."""

import asyncio
from typing import Any

from integration_tests.server import LauncherHandle, token_ids

PROMPT = "the cat sat on the mat and the dog ran in the rain; "
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "ignore_eos_token": True}
BLOCK_SIZE = 16


def sequences_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The best one and the others, each with its tokens and its seed."""
    details = answer["details"]
    return [details, *details.get("best_of_sequences", [])]


def check_each_alone(server: LauncherHandle, inputs: str, answer: dict[str, Any]) -> None:
    """Asks for each sequence again by its seed, alone."""
    for sequence in sequences_of(answer):
        asked = {**DRAWN, "seed": sequence["seed"], "max_new_tokens": len(sequence["tokens"])}
        assert token_ids(server.generate(inputs, **asked)) == token_ids({"details": sequence})


async def ask(server: LauncherHandle, inputs: str, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
    async with server.async_client() as client:
        response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_best_of_writes_what_each_seed_writes_alone(server: LauncherHandle) -> None:
    answer = server.generate(PROMPT * 4, best_of=2, max_new_tokens=40, **DRAWN)
    first, second = sequences_of(answer)
    assert first["seed"] != second["seed"] and first["tokens"] != second["tokens"]
    check_each_alone(server, PROMPT * 4, answer)


def test_prompt_logprobs_are_those_of_the_prompt_in_both(server: LauncherHandle) -> None:
    asked = {"decoder_input_details": True, "max_new_tokens": 3}
    alone = server.generate(PROMPT, **asked)["details"]["prefill"]
    best, other = sequences_of(server.generate(PROMPT, best_of=2, **asked, **DRAWN))
    assert best["prefill"] == other["prefill"] == alone and len(alone) > BLOCK_SIZE


def test_many_sequences_hold_one_prompt(server: LauncherHandle) -> None:
    """8 sequences after about 280 tokens: 18 blocks each if they were not shared."""
    num, max_new_tokens = 8, 100
    inputs = PROMPT * 12
    asked = {**DRAWN, "best_of": num, "max_new_tokens": max_new_tokens}

    async def answer_and_readings() -> tuple[dict[str, Any], list[float]]:
        readings = []
        task = asyncio.create_task(ask(server, inputs, **asked))
        while not task.done():
            metrics = await asyncio.to_thread(server.metrics)
            if metrics["tgi_batch_current_size"] == num:
                readings.append(metrics["tgi_kv_blocks_used"])
        return await task, readings

    length = server.generate(inputs, max_new_tokens=1, decoder_input_details=True)
    num_prompt_blocks = len(length["details"]["prefill"]) / BLOCK_SIZE
    assert num_prompt_blocks > 12
    own_blocks = 2 + max_new_tokens // BLOCK_SIZE
    # Not shared, the prompts alone take 8 * num_prompt_blocks.
    few = 2 * num_prompt_blocks + num
    readings: list[float] = []
    for _ in range(50):
        # An answer takes less than a tenth of a second, and is sometimes over before a reading.
        answer, more = asyncio.run(answer_and_readings())
        readings += more
        if readings and min(readings) < few:
            break
    assert min(readings) < few
    assert max(readings) <= num_prompt_blocks + num * own_blocks
    assert len(sequences_of(answer)) == num
    check_each_alone(server, inputs, answer)


def test_everything_ends_in_hardly_any_memory(cramped: LauncherHandle) -> None:
    """The sequences of one request need half of the blocks, however late the others come."""
    prompts = [PROMPT[start:] for start in range(8)]
    before = cramped.metrics()

    async def all_answers() -> list[dict[str, Any]]:
        asked = {**DRAWN, "best_of": 4, "max_new_tokens": 64}
        return list(await asyncio.gather(*(ask(cramped, prompt, **asked) for prompt in prompts)))

    answers = asyncio.run(all_answers())
    cramped.assert_idle()
    after = cramped.metrics()
    assert after["tgi_request_success"] == before["tgi_request_success"] + 32
    assert after["tgi_request_preempted"] > before["tgi_request_preempted"]
    assert after["tgi_kv_blocks_free"] == 512 / BLOCK_SIZE
    for prompt, answer in zip(prompts[:3], answers[:3], strict=True):
        assert [len(sequence["tokens"]) for sequence in sequences_of(answer)] == [64] * 4
        check_each_alone(cramped, prompt, answer)
