"""Rows that read blocks written by an earlier row of the same or of an earlier prefill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_generation_proto import pb

from shard.tests.driver import Driver, changed, load_engine

LONG = {"max_new_tokens": 12, "ignore_eos_token": True}
DRAWN = {"do_sample": True, "temperature": 1.3}
# In blocks of 16: at an edge, past it, a whole number of blocks, several blocks.
LENGTHS = [16, 17, 32, 40, 70]


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * place + place * place) % 250 for place in range(length)]


def follower(
    driver: Driver, request_id: int, leader: pb.Request, known: list[int], **options: Any
) -> pb.Request:
    """A request that shares the leader's prompt blocks, as planned by the router."""
    size = driver.engine.block_size
    num_shared = (leader.num_prompt_tokens - 1) // size
    request = driver.request(
        request_id, known, num_prompt_tokens=leader.num_prompt_tokens, **options
    )
    table = [*leader.block_table[:num_shared], *request.block_table[num_shared:]]
    return changed(request, block_table=table, num_cached_tokens=num_shared * size)


def alone(driver: Driver, prompt: list[int], seed: int) -> list[int]:
    driver.add([driver.request(seed, prompt, sampling={**DRAWN, "seed": seed}, **LONG)])
    driver.run()
    return driver.tokens[seed]


FAMILIES = ["llama3", "mistral", "llama-dynamic", "phi3"]


@pytest.mark.parametrize(
    ("family", "max_prefill_tokens", "device"),
    [
        *((family, most, "cpu") for family in FAMILIES for most in (4096, 16, 7)),
        *(("llama-dynamic", most, "stream") for most in (4096, 7)),
    ],
)
def test_siblings_write_what_each_writes_alone(
    family: str, max_prefill_tokens: int, device: str, checkpoint: Callable[[str], Path]
) -> None:
    """In one prefill, also in passes that end inside a block."""
    driver = Driver(load_engine(checkpoint(family), max_prefill_tokens, device))
    for length in LENGTHS:
        prompt = prompt_of(length)
        wanted = [alone(driver, prompt, seed) for seed in range(3)]
        first = 1000 * length
        leader = driver.request(first, prompt, sampling={**DRAWN, "seed": 0}, **LONG)
        siblings = [
            follower(driver, first + seed, leader, prompt, sampling={**DRAWN, "seed": seed}, **LONG)
            for seed in (1, 2)
        ]
        stranger = driver.request(first + 9, [5] * 20, **LONG)
        driver.add([stranger, leader, *siblings])
        driver.run()
        assert [driver.tokens[first + seed] for seed in range(3)] == wanted
        for seed in range(3):
            driver.tokens.pop(seed)
