"""All layers in one call compute the same as one by one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from text_generation_proto import pb
from text_generation_shard.device.base import ForwardBatch
from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.device.cpu.runner import FusedDecoder
from text_generation_shard.device.reference.runner import EagerForward
from text_generation_shard.engine.engine import Engine
from torch import Tensor

from integration_tests.checkpoints import write_checkpoint
from shard.tests.driver import Driver, load_engine

pytestmark = pytest.mark.slow

FLOAT32 = {"dtype": "float32"}
BFLOAT16 = {"dtype": "bfloat16"}
INT8 = {"dtype": "bfloat16", "quantize": "int8"}
INT4 = {"dtype": "bfloat16", "quantize": "int4"}
# Biases, windows, layers without rotation, partial rotation, multipliers.
CASES = [
    *(("llama3", form) for form in (FLOAT32, BFLOAT16, INT8, INT4)),
    *((family, FLOAT32) for family in ("llama-bias", "mistral", "smollm3", "granite")),
    *((family, BFLOAT16) for family in ("qwen2", "phi3")),
    ("qwen3", FLOAT32),
]


def answers(engine: Engine) -> list[list[float]]:
    """Log-probabilities of prompts of many lengths and of their continuations."""
    driver = Driver(engine)
    ids = [
        [3 + (7 * place + number) % 250 for place in range(1 + 9 * number)] for number in range(6)
    ]
    for number, prompt in enumerate(ids):
        driver.add([driver.request(number, prompt, max_new_tokens=4, prefill_logprobs=True)])
    driver.run()
    return [driver.prefill_logprobs[number][1:] + driver.logprobs[number] for number in range(6)]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_equals_one_by_one(family: str, form: dict[str, str], tmp_path: Path) -> None:
    # Sizes that int4 supports.
    path = write_checkpoint(family, tmp_path, mlp_bias=False, intermediate_size=128)
    engine = load_engine(path, **form)
    runner: Any = engine.runner
    assert ("quantize" in form and not are_vectors_wide()) == (runner._decoder is None)
    compiled = answers(engine)
    runner._forward, runner._decoder = EagerForward(engine.model), None
    one_by_one = answers(engine)
    if family != "qwen3":
        assert compiled == one_by_one
    # torch normalizes its heads in that case, with another order of additions.
    for left, right in zip(compiled, one_by_one, strict=True):
        assert left == pytest.approx(right, abs=1e-5)


def mixed_answers(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of passes that sample after only some tokens: several prompts at
    once, parts of prompts with decoding rows, draft tokens."""
    driver = Driver(engine)
    request = partial(driver.request, ignore_eos_token=True)
    ids = [[3 + (7 * place + 11 * number) % 90 for place in range(120)] for number in range(6)]
    # Two prompts that end in this pass, one that does not, and no decoding row.
    first = [request(number, ids[number][: 5 + 30 * number]) for number in range(2)]
    driver.add([*first, request(2, ids[2], chunk_len=16)])
    # Two decoding rows, and parts of prompts without sampling.
    driver.step({2: 32})
    driver.add([request(3, ids[3], chunk_len=48)], driver.advance({2: 16}))
    driver.step({2: 56, 3: 16}, speculate=3)
    driver.step({3: 56}, speculate=3)
    driver.run()
    # No row decodes, and no prompt is complete.
    driver.add([request(4, ids[4], chunk_len=64), request(5, ids[5], chunk_len=16)])
    driver.step({4: 56, 5: 48})
    driver.step({5: 56})
    driver.run()
    return [(driver.tokens[number], driver.logprobs[number]) for number in range(6)]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_hidden_states_that_are_not_wanted_change_nothing(
    family: str, form: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"mlp_bias": False, "intermediate_size": 128}
    if family == "llama3":
        # More query heads per KV head than query vectors of a task.
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16}
    engine = load_engine(write_checkpoint(family, tmp_path, **sizes), **form)
    narrowed = mixed_answers(engine)
    assert all(len(tokens) == 8 for tokens, _ in narrowed)
    with monkeypatch.context() as patch:
        # All tokens through all layers.
        patch.setattr(
            FusedDecoder,
            "scores",
            lambda own, batch: engine.model.logits(own.hidden(batch)[wanted_of(batch)]),
        )
        assert mixed_answers(engine) == narrowed
    alone = []
    for number in range(6):
        driver = Driver(engine)
        ids = [3 + (7 * place + 11 * number) % 90 for place in range(120)]
        ids = ids[: 5 + 30 * number] if number < 2 else ids
        driver.add([driver.request(0, ids, ignore_eos_token=True)])
        driver.run()
        alone.append((driver.tokens[0], driver.logprobs[0]))
    if engine.is_deterministic:
        assert alone == narrowed


def wanted_of(batch: ForwardBatch) -> Tensor | slice:
    """The hidden states whose logits are wanted."""
    return slice(None) if batch.logits_indices is None else batch.logits_indices


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 5},
    {"do_sample": True, "top_p": 0.8, "typical_p": 0.9, "seed": 6, "watermark": True},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((7, 3.0),)},
]


@pytest.mark.parametrize(("family", "form"), [("granite", FLOAT32), ("qwen2", INT8)])
def test_the_short_way_of_a_decode_is_the_long_one(
    family: str, form: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(family, tmp_path, intermediate_size=128)
    engine = load_engine(path, **form)

    def run() -> tuple[Driver, list[pb.StepResponse]]:
        driver = Driver(engine)
        for number, sampling in enumerate(SAMPLINGS):
            ids = range(3, 9 + 17 * number)
            driver.add([driver.request(number, ids, sampling=sampling, top_n_tokens=number)])
        return driver, [driver.step() for _ in range(6)]

    runner: Any = engine.runner
    assert (runner._decoder is not None) == ("quantize" not in form or are_vectors_wide())
    short, results = run()
    engine.clear()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_decoder", None)
        long, expected = run()
    assert (short.tokens, short.logprobs) == (long.tokens, long.logprobs)
    for one, other in zip(results, expected, strict=True):
        assert one.generations.top_token_ids == other.generations.top_token_ids
        assert one.generations.top_token_logprobs == other.generations.top_token_logprobs
