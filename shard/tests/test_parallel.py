"""Two ranks, each with its part of the weights, compute what one does; rank 0 chooses for both."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_shard.config import ShardConfig
from text_generation_shard.device.reference.collectives import GlooCollectives
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import World
from text_generation_shard.server import load_on

from shard.tests.driver import Driver, load_engine, reference_device

SAMPLING = {"do_sample": True, "temperature": 1.2, "seed": 9, "top_k": 50}


def run(driver: Driver) -> dict[str, Any]:
    """Prompts in parts, rows that decode beside them, guesses, prompt log-probabilities."""
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos_token": True}
    driver.add([driver.request(0, range(3, 40), prefill_logprobs=True, **options)])
    driver.step()
    driver.add([driver.request(1, [7, 8, 9] * 9, **options)], driver.advance({}, 3))
    driver.add([driver.request(2, range(9, 30), sampling=SAMPLING, **options)], driver.advance({}))
    while driver.running:
        driver.step(speculate=3)
    return {"tokens": driver.tokens, "prompt": driver.prefill_logprobs[0][1:]}


def rank_main(rank: int, path: str, meeting: str) -> None:
    """What one of two processes does; prints what it found."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    engine = load_engine(
        Path(path), device=reference_device(), world=World(rank, 2, GlooCollectives())
    )
    print(json.dumps(run(Driver(engine))))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["llama-bias", "phi3", "qwen3"])
def test_two_ranks_are_as_one(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tied and untied heads, biases on both sides of a split, fused projections, normed heads."""
    path = checkpoint(family)
    code = "import sys; from shard.tests.test_parallel import rank_main; "
    code += f"rank_main(int(sys.argv[1]), {str(path)!r}, {str(tmp_path / 'meeting')!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=root)
        for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    expected = run(Driver(load_engine(path, device=reference_device())))
    tokens = {str(number): ids for number, ids in expected["tokens"].items()}
    assert found[0]["tokens"] == found[1]["tokens"] == tokens
    assert found[0]["prompt"] == pytest.approx(expected["prompt"], abs=1e-4)
    assert found[1]["prompt"] == pytest.approx(expected["prompt"], abs=1e-4)


def test_what_can_not_be_divided_is_one_sentence(tiny_model_path: Path) -> None:
    config = ShardConfig(model_path=tiny_model_path)
    with pytest.raises(ModelError, match="can not be split among 3 shards"):
        load_on(reference_device(), config, World(0, 3))


def test_one_rank_gets_back_what_it_gives() -> None:
    world, values = World(), torch.ones(3)
    assert world.all_reduce(values) is values and world.all_gather(values) is values
    numbers = values.long().numpy()
    assert world.broadcast(numbers) is numbers
