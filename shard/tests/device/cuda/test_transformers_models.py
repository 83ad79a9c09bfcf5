"""Models that transformers computes, by the CUDA device's operators."""

from pathlib import Path

import pytest
import torch

from integration_tests.marks import at_night
from shard.tests import interpreted
from shard.tests.driver import Driver, load_engine
from shard.tests.models.architectures import answers_of, ragged_prompts, write_architecture

pytestmark = [pytest.mark.slow, *interpreted.MARKS]


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", *at_night("gemma2", "gemma3_text", "gpt2")])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, prompts = write_architecture(name, tmp_path), ragged_prompts()[4:7]
    limits = {"max_prefill_tokens": 32, "max_batch_size": 4, "max_total_tokens": 32}
    device = interpreted.device(torch.float32)
    driver = Driver(load_engine(path, device=device, model_impl="transformers", **limits))
    requests = [driver.request(n, ids, max_new_tokens=4) for n, ids in enumerate(prompts)]
    driver.add(requests[:2])
    driver.add(requests[2:], driver.advance({}))
    driver.run()
    for number, answer in enumerate(answers_of(path, prompts, 4)):
        certain = answer.num_certain
        assert driver.tokens[number][:certain] == answer.tokens[:certain]
