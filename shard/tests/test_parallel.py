"""Two ranks, each with a part of the weights, choose the same tokens as one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_shard.config import ShardConfig
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import World
from text_generation_shard.server import load_on, read_config

from shard.tests.driver import Driver, load_engine, reference_device
from shard.tests.ranks import run_ranks

SAMPLING = {"do_sample": True, "temperature": 1.2, "seed": 9, "top_k": 50}


def run(driver: Driver) -> dict[str, Any]:
    """Chunked prompts beside decoding rows, draft tokens, prompt log-probabilities."""
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos_token": True}
    driver.add([driver.request(0, range(3, 40), prefill_logprobs=True, **options)])
    driver.step()
    driver.add([driver.request(1, [7, 8, 9] * 9, **options)], driver.advance({}, 3))
    driver.add([driver.request(2, range(9, 30), sampling=SAMPLING, **options)], driver.advance({}))
    while driver.running:
        driver.step(speculate=3)
    return {"tokens": driver.tokens, "prompt": driver.prefill_logprobs[0][1:]}


@pytest.mark.parametrize("family", ["llama-bias", "phi3", "qwen3"])
def test_two_ranks_are_as_one(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Tied and untied heads, biases on both sides of a split, fused projections, normed heads. Each
    rank samples independently."""
    path = checkpoint(family)

    def body(world: World) -> dict[str, Any]:
        return run(Driver(load_engine(path, device=reference_device(), world=world)))

    expected = run(Driver(load_engine(path, device=reference_device())))
    found = run_ranks(2, body)
    assert [rank["tokens"] for rank in found] == [expected["tokens"]] * 2
    for rank in found:
        assert rank["prompt"] == pytest.approx(expected["prompt"], abs=1e-4)


def test_what_can_not_be_divided_is_one_sentence(tiny_model_path: Path) -> None:
    config = ShardConfig(model_path=tiny_model_path)
    with pytest.raises(ModelError, match="can not be split among 3 shards"):
        load_on(reference_device(), config, read_config(config), World(0, 3))


def test_one_rank_gets_back_what_it_gives() -> None:
    world, values = World(), torch.ones(3)
    assert world.all_reduce(values) is values and world.all_gather(values) is values
    numbers = values.long().numpy()
    assert world.broadcast(numbers) is numbers
