"""The engine's tokens and log-probabilities equal those of transformers, in any batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from integration_tests.checkpoints import FAMILIES
from integration_tests.marks import at_night
from integration_tests.oracle import Oracle, ragged_prompts
from shard.tests.driver import Driver, load_engine

pytestmark = pytest.mark.slow

PIECES = (4096, 37)
# Biases, windows, layers without rotation, fused projections, multipliers, several files.
BY_DAY = (
    "llama3",
    "llama-bias",
    "llama-yarn",
    "llama-sharded",
    "qwen3",
    "smollm3-sliding",
    "phi3-longrope",
    "granite",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family", [*BY_DAY, *at_night(*(name for name in FAMILIES if name not in BY_DAY))]
)
def test_equals_transformers(family: str, device: str, checkpoint: Callable[[str], Path]) -> None:
    """16 ragged prompts, four at first, the others joining two steps apart; 4 to 24 new tokens."""
    path = checkpoint(family)
    oracle = Oracle(path, family)
    prompts = [oracle.encode(text) for text in ragged_prompts(path)]
    wanted = [4 + index * 5 % 21 for index in range(len(prompts))]
    expected = [
        oracle.greedy(text, wanted[index]) for index, text in enumerate(ragged_prompts(path))
    ]
    logprobs = [oracle.logprobs(ids) for ids in prompts]
    for budget in PIECES:
        driver = Driver(load_engine(path, max_prefill_tokens=budget, device=device))
        waiting = [
            driver.request(index, ids, max_new_tokens=wanted[index], prefill_logprobs=True)
            for index, ids in enumerate(prompts)
        ]
        driver.add(waiting[:4])
        for request in waiting[4:]:
            if driver.running:
                driver.step()
            driver.add([request])
        driver.run()
        assert [driver.tokens[index] for index in range(len(prompts))] == expected
        for index, ids in enumerate(prompts):
            served = driver.prefill_logprobs[index]
            assert len(served) == len(ids)
            assert served[1:] == pytest.approx(logprobs[index], abs=1e-4)
        assert driver.engine.num_rows_taken == 0
        assert sorted(driver.free) == list(range(len(driver.free)))


# The processor's kernels have tests of bfloat16 of their own.
IN_BFLOAT16 = [
    *((family, "cpu") for family in ("llama3", "mistral", "granite")),
    *(pytest.param(family, "cuda", marks=pytest.mark.gpu) for family in FAMILIES),
]


@pytest.mark.parametrize(("family", "device"), IN_BFLOAT16)
def test_bfloat16_is_as_good_as_transformers(
    family: str, device: str, checkpoint: Callable[[str], Path]
) -> None:
    """Compares the error of prompt log-probabilities on the same device."""
    path = checkpoint(family)
    exact = Oracle(path, family, device)
    prompts = [exact.encode(text) for text in ragged_prompts(path)]
    wanted = torch.tensor([value for ids in prompts for value in exact.logprobs(ids)])
    rounded = Oracle(path, family, device, torch.bfloat16)
    theirs = torch.tensor([value for ids in prompts for value in rounded.logprobs(ids)])
    driver = Driver(load_engine(path, device=device, dtype="bfloat16"))
    driver.add(
        [
            driver.request(index, ids, max_new_tokens=1, prefill_logprobs=True)
            for index, ids in enumerate(prompts)
        ]
    )
    ours = torch.tensor(
        [value for index in range(len(prompts)) for value in driver.prefill_logprobs[index][1:]]
    )
    loss, their_loss = ((found - wanted).square().mean().sqrt() for found in (ours, theirs))
    assert 0 < loss <= 1.5 * their_loss
