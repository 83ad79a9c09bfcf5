"""Warm-up: a shard measures its memory and the times of its steps."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from text_generation_proto import pb
from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.engine import warmup
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.warmup import LargestStep, measure, profile_memory, warm_up
from text_generation_shard.errors import ModelError
from text_generation_shard.parallel import World

from shard.tests.driver import Driver, limits_of, load_engine, reference_device
from shard.tests.engine.test_memory_profile import peak_of

ROWS, PROMPT = 8, 384


@pytest.fixture(scope="module")
def engine(tiny_model_path: Path) -> Engine:
    return load_engine(tiny_model_path)


def test_the_ledger_names_everything(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    limits = limits_of(64, 4, max_total_tokens=200, max_batch_total_tokens=3200)
    with caplog.at_level(logging.INFO):
        result = warm_up(engine, limits)
    lines = [line for line in caplog.messages if line.startswith("memory: ")]
    names = [line.split(":")[1][:12].strip() for line in lines]
    assert names == ["weights", "KV cache", "activations", "graphs"]
    assert "200 blocks of 16 tokens in float32" in lines[1]
    assert "64 prompt tokens beside 4 rows" in lines[2]
    assert result.kv_cache_bytes == 200 * 16 * 2 * 3 * 2 * 16 * 4
    assert engine.num_rows_taken == 0


@pytest.mark.parametrize(("rows", "longest"), [(1, 2), (1, 3), (4, 60), (64, 400)])
def test_steps_are_measured_with_any_limits(engine: Engine, rows: int, longest: int) -> None:
    result = warm_up(engine, limits_of(64, rows, max_total_tokens=longest))
    assert 0 < result.prefill_token_ns <= result.decode_step_ns
    assert engine.num_rows_taken == 0


class ScriptedSteps:
    """An engine whose steps take 5 ms, 100 us per token, and 20 ns per preceding token of each."""

    block_size, world = 16, World()

    def __init__(self) -> None:
        self.runner = SimpleNamespace(records_steps=False, compiles_steps=False)

    def step(self, step: pb.Step, requests: Sequence[pb.Request] = ()) -> pb.StepResponse:
        result = pb.StepResponse()
        if not requests:
            return pb.StepResponse(batch=pb.CachedBatch(request_ids=[0]), total_ns=5_100_000)
        for item in requests:
            count = len(item.input_ids) - item.num_cached_tokens
            result.total_ns += count * (100_000 + 20 * item.num_cached_tokens)
            if item.stopping_parameters.max_new_tokens > 1:
                result.batch.request_ids.append(item.id)
        result.total_ns += 5_000_000
        return result

    def clear(self) -> None:
        pass


@pytest.mark.parametrize(("longest", "context_ns"), [(8192, 20 * 1024), (400, 20 * 1024), (100, 0)])
def test_tokens_in_front_of_a_prompt_token_have_their_price(longest: int, context_ns: int) -> None:
    costs = measure(ScriptedSteps(), 4096, 8, longest)
    assert costs.context_ns == pytest.approx(context_ns, rel=0.01)
    assert costs.token_ns == pytest.approx(100_000, rel=0.01)


def test_a_long_step_is_measured_once_unless_it_may_have_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedSteps()
    plain, asked = engine.step, Counter[bool]()

    def step(given: pb.Step, requests: Sequence[pb.Request] = ()) -> pb.StepResponse:
        found = plain(given, requests)
        asked[bool(requests)] += 1
        found.total_ns *= 100
        return found

    monkeypatch.setattr(engine, "step", step)
    costs = measure(engine, 4096, 8, 8192)
    assert costs.token_ns == pytest.approx(10_000_000, rel=0.01)
    assert asked[True] == 4, "with everything, a prompt, behind others, all rows"
    asked.clear()
    engine.runner.compiles_steps = True
    assert measure(engine, 4096, 8, 8192) == costs
    assert asked[True] == 8


def test_recorded_steps_are_measured_as_they_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of all rows is fast after four runs."""
    engine, asked = ScriptedSteps(), 0
    engine.runner.records_steps = True
    plain = engine.step

    def step(given: pb.Step, requests: Sequence[pb.Request] = ()) -> pb.StepResponse:
        nonlocal asked
        asked = 0 if len(requests) == 1 else asked + 1
        found = plain(given, requests)
        found.total_ns = 1_000_000 if asked > 4 else found.total_ns
        return found

    monkeypatch.setattr(engine, "step", step)
    assert measure(engine, 4096, 8, 8192).full_ns == 1_000_000


def test_memory_set_aside_for_a_step_is_enough(tiny_model_path: Path) -> None:
    """The largest step, by torch's allocations: prompt tokens beside decoding rows, with prompt
    log-probabilities and all sampling parameters."""
    engine = load_engine(tiny_model_path, max_prefill_tokens=PROMPT)
    driver = Driver(engine)
    sampling = {
        **{"temperature": 1.3, "top_k": 200, "top_p": 0.9, "typical_p": 0.9},
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.4, "watermark": True},
    }
    options = {"max_new_tokens": 9, "ignore_eos_token": True, "sampling": sampling}
    driver.add([driver.request(n, [5 + n] * 9, **options) for n in range(ROWS - 1)])
    last = driver.request(ROWS, list(range(3, 300)) + [7] * 80, prefill_logprobs=True, **options)
    advance = driver.advance({})
    _, peak = peak_of(lambda: driver.add([last], advance))
    limits = limits_of(PROMPT, ROWS)
    shape = warmup.CacheShape(3, 2, 16, engine.block_size, torch.float32)
    reserved = warmup.activation_bytes(engine.model, torch.float32, limits)
    reserved += engine.model.attention.workspace_bytes(shape)
    assert peak < reserved
    assert peak > reserved / 10, "what is set aside is not far from what is needed"
    driver.run()


def test_deterministic_is_kept_or_refused(tiny_model_path: Path) -> None:
    assert load_engine(tiny_model_path, deterministic=True).is_deterministic
    assert load_engine(tiny_model_path, dtype="bfloat16").is_deterministic
    # torch multiplies 8 bits where our kernels do not.
    quantized = load_engine(tiny_model_path, dtype="bfloat16", quantize="int8")
    assert quantized.is_deterministic == are_vectors_wide()
    with pytest.raises(ModelError, match="--deterministic is not supported"):
        load_engine(tiny_model_path, dtype="float32", quantize="int8", deterministic=True)


@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_the_largest_steps_run_whatever_the_context_is(context: int, tiny_model_path: Path) -> None:
    engine = load_engine(tiny_model_path, 8, reference_device(), None, 4, 200)
    engine.use_table(4, max(context, 2), 1, 8)
    profile_memory(engine, LargestStep(4, 2, 2, context))
    assert engine.num_rows_taken == 0
