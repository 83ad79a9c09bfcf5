"""What warm-up profiles if a device measures its memory: no later step takes more."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from text_generation_proto import pb
from text_generation_shard.device.base import ForwardBatch, MemoryBudget, Model, ScheduledTokens
from text_generation_shard.device.cuda import attention, operators
from text_generation_shard.device.cuda.attention import HeadShape
from text_generation_shard.device.cuda.runner import StreamRunner
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.planner import Costs
from text_generation_shard.engine.warmup import LargestStep, largest_steps, warm_up
from text_generation_shard.errors import ModelError
from torch.profiler import ProfilerActivity, profile

from shard.tests.driver import Driver, limits_of, load_engine, reference_device
from shard.tests.stream_device import StreamDevice

ROWS, TOKENS, LONGEST, KEYS = 6, 64, 200, 384


class MeasuringDevice(StreamDevice):
    """Measures its memory as a GPU does."""

    def __init__(self) -> None:
        super().__init__(reference_device(), cuda_graphs=None)
        self.peak = 0
        # The largest pass there is memory for.
        self.most = 10**6

    def attention(self, *shape: Any) -> Any:
        found = self._own.attention(*shape)
        found.heaviest_keys = KEYS  # type: ignore[attr-defined]
        return found

    def free_bytes(self, step_bytes: int, profile_memory: Callable[[], None]) -> MemoryBudget:
        if self.peak:
            profile_memory()
        else:
            _, self.peak = peak_of(profile_memory)
        return MemoryBudget(2**26, self.peak)

    def runner(self, model: Model) -> StreamRunner:  # type: ignore[override]
        runner = super().runner(model)
        make = runner._batch

        def limited(rows: Any, scheduled: ScheduledTokens) -> ForwardBatch:
            if int(scheduled.counts.sum()) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(rows, scheduled)

        runner._batch = limited  # type: ignore[method-assign]
        return runner


def peak_of(compute: Callable[[], Any]) -> tuple[Any, int]:
    """Its result, and torch's peak bytes during it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        answer = compute()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return answer, peak


@pytest.fixture(scope="module")
def device() -> MeasuringDevice:
    return MeasuringDevice()


@pytest.fixture
def is_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take is not asked for."""
    costs = Costs(10**6, 10**6, 1, 0)
    monkeypatch.setattr("text_generation_shard.engine.warmup.measure", lambda *_: costs)


@pytest.fixture(scope="module")
def engine(device: MeasuringDevice, tiny_model_path: Path) -> Engine:
    return load_engine(tiny_model_path, TOKENS, device, None, ROWS, LONGEST)


def test_nothing_takes_more_than_what_was_profiled(engine: Engine, device: MeasuringDevice) -> None:
    driver = Driver(engine)
    sampling = {
        **{"temperature": 1.3, "do_sample": True, "top_k": 200, "top_p": 0.9, "typical_p": 0.9},
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.4, "watermark": True},
    }
    options = {"ignore_eos_token": True, "sampling": sampling, "top_n_tokens": 5}
    known, running = LONGEST - 12, range(ROWS - 1)
    driver.add([driver.request(n, [3] * known, max_new_tokens=12, **options) for n in running])
    ids = [7] * (LONGEST - 2)
    last = driver.request(ROWS, ids, max_new_tokens=2, prefill_logprobs=True, **options)
    driver.add([driver.part(last, LONGEST - 2 - TOKENS)], driver.advance({}))

    def compute() -> None:
        # A step, and one more that is launched before its scores are gone.
        handles = [driver.launch((), **options) for options in (driver.advance({ROWS: TOKENS}), {})]
        assert [len(handle.result().generations.token_ids) for handle in handles] == [ROWS, ROWS]

    _, peak = peak_of(compute)
    engine.clear()
    assert peak < device.peak < 2 * peak


@pytest.mark.parametrize(
    ("rows", "tokens", "longest", "keys", "expected"),
    [
        (256, 4096, 131072, None, [(256, 1, 4096, 131072)]),
        # What is gathered is most at a shorter context than the longest …
        (256, 4096, 131072, 65536, [(256, 1, 4096, 131072), (256, 1, 4096, 65536)]),
        # … or for several prompts.
        (256, 4096, 8192, 65536, [(256, 1, 4096, 8192), (256, 8, 4096, 8192)]),
        (4, 4096, 8192, 65536, [(4, 1, 4096, 8192), (4, 4, 4096, 8192)]),
        (256, 4096, 40000, 65536, [(256, 1, 4096, 40000), (256, 2, 4096, 32768)]),
        # Many prompts make as many tokens as a pass may have.
        (64, 4096, 202, None, [(64, 21, 4096, 202)]),
        (2, 4096, 202, 65536, [(2, 2, 4096, 202)]),
        (1, 16, 2, 65536, [(1, 1, 16, 2)]),
    ],
)
def test_the_largest_steps_are_profiled(
    rows: int, tokens: int, longest: int, keys: int | None, expected: list[tuple[int, ...]]
) -> None:
    found = largest_steps(rows, tokens, longest, keys)
    assert found == [LargestStep(*numbers) for numbers in expected]


def test_a_gpu_gathers_keys_up_to_a_number() -> None:
    """And so a longer context may take less memory."""
    shape = HeadShape(32, 8, 128, 1.0)
    for takes_flash, expected in ((True, attention.MOST_TOKENS), (False, None)):
        found = attention.TritonAttention(shape, torch.device("meta"), 90, takes_flash=takes_flash)
        assert found.heaviest_keys == expected


@pytest.mark.parametrize(
    "limits",
    [limits_of(16, 1, max_total_tokens=2), limits_of(16, 3, max_total_tokens=3)],
)
@pytest.mark.usefixtures("is_unmeasured")
def test_the_smallest_limits_can_be_profiled(engine: Engine, limits: pb.WarmupRequest) -> None:
    assert warm_up(engine, limits).max_total_tokens == limits.max_total_tokens
    assert engine.num_rows_taken == 0


@pytest.mark.usefixtures("is_unmeasured")
def test_a_memory_profile_without_memory_names_the_flags(
    engine: Engine, device: MeasuringDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "most", TOKENS)
    with pytest.raises(ModelError, match=r"64 prefill tokens beside 6 req.*max-batch-prefill"):
        warm_up(engine, limits_of(TOKENS, ROWS, max_total_tokens=LONGEST))
    monkeypatch.setattr(device, "most", 10**6)
    assert warm_up(engine, limits_of(TOKENS, ROWS, max_total_tokens=LONGEST)).num_blocks


def test_a_gpu_gives_the_rest_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GB, 16 are weights. The memory profile takes 10 more at its peak, keeps 4 for later,
    and leaves recorded steps of 2, which can not be given back."""
    total, peak, graphs = 80 * 10**9, 10 * 10**9, 2 * 10**9
    held = {"weights": 16 * 10**9, "kept": 4 * 10**9}
    is_profiled: list[bool] = []
    answers: dict[str, Callable[..., Any]] = {
        "reset_peak_memory_stats": lambda *_: not is_profiled or pytest.fail("too late"),
        "max_memory_allocated": lambda *_: held["weights"] + peak,
        "memory_allocated": lambda *_: held["weights"],
        "memory_reserved": lambda *_: sum(held.values()) + graphs,
        "mem_get_info": lambda *_: (total - sum(held.values()) - graphs, total),
        "empty_cache": lambda: held.update(kept=0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device = object.__new__(operators.CudaDevice)
    device.torch_device, device._memory_fraction = torch.device("cuda"), 0.9 / 0.95
    device._graphs = SimpleNamespace(  # type: ignore[assignment]
        bytes_of_all=lambda held: 3 * 10**9 if held() else 0
    )
    memory_budget = device.free_bytes(1000, lambda: is_profiled.append(True))
    assert is_profiled
    # Of 80 GB: a tenth is for others, and 8, 16, 10, 2 and 3 are taken.
    assert memory_budget.step == 10e9 and memory_budget.cache == pytest.approx(
        (80 - 8 - 16 - 10 - 2 - 3) * 10**9, abs=2
    )
    assert memory_budget.graphs == 3 * 10**9
