"""Passes that are recorded once and replayed."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_proto import pb
from text_generation_shard.device.cuda.runner import DeviceRows, Graphs, sizes_of
from torch import Tensor

from shard.tests.driver import Driver, load_engine, reference_device, step_of
from shard.tests.stream_device import StreamDevice


@pytest.mark.parametrize(
    ("asked", "rows", "expected"),
    [
        (None, 1, (1,)),
        (None, 3, (1, 2, 3)),
        (None, 12, (1, 2, 4, 8, 12)),
        (None, 32, (1, 2, 4, 8, 16, 24, 32)),
        ((8, 2, 2), 32, (2, 8)),
        ((), 32, ()),
    ],
)
def test_sizes(asked: tuple[int, ...] | None, rows: int, expected: tuple[int, ...]) -> None:
    assert sizes_of(asked, rows) == expected


def launched_ahead(driver: Driver, prompts: int, steps: int) -> list[pb.Generations]:
    """Results of steps with several requests, each launched before the previous one is
    collected."""
    requests = [
        driver.request(
            number,
            range(3 + number, 20 + 5 * number),
            max_new_tokens=steps + 2,
            ignore_eos_token=True,
            top_n_tokens=2 if number == 1 else 0,
            sampling={"do_sample": True, "seed": 3} if number == 2 else {},
        )
        for number in range(prompts)
    ]
    engine = driver.engine
    handles = [engine.launch(*step_of(engine, requests, runs_on=False))]
    found = []
    for step in range(1, steps + 1):
        grown = []
        for request in requests:
            table = driver.tables[request.id]
            if len(request.input_ids) + step > len(table) * engine.block_size:
                table.append(driver.free.pop())
                grown.append((request.id, table[-1]))
        handles.append(engine.launch(*step_of(engine, grown=grown)))
        found.append(handles.pop(0).result().generations)
    return [*found, handles[0].result().generations]


def are_equal(outputs: list[pb.Generations], expected: list[pb.Generations]) -> bool:
    """The tokens, and but for rounding the log-probabilities. `approx` does not round, so that no
    two values that are nearly equal differ."""
    return all(
        one.token_ids == other.token_ids
        and one.top_token_ids == other.top_token_ids
        and one.logprobs == pytest.approx(other.logprobs, rel=0, abs=2e-5)
        for one, other in zip(outputs, expected, strict=True)
    )


@pytest.fixture(scope="module")
def expected(tiny_model_path: Path) -> list[pb.Generations]:
    """Without graphs, and without steps ahead."""
    return launched_ahead(Driver(load_engine(tiny_model_path, device=reference_device())), 3, 12)


def stream_driver(path: Path) -> Driver:
    """An engine whose device records; three rows are padded to four."""
    device = reference_device(StreamDevice)
    driver = Driver(load_engine(path, device=device, max_batch_size=4))
    # Discard the recordings of the warm-up, so that each test records every size.
    runner: Any = driver.engine.runner
    runner.graphs.use(runner._rows)
    return driver


def graphs_of(driver: Driver) -> Graphs:
    found: Graphs = driver.engine.runner.graphs  # type: ignore[attr-defined]
    return found


def test_recorded_steps_give_what_others_give(
    tiny_model_path: Path, expected: list[pb.Generations]
) -> None:
    """Padded to a size, replayed with other tokens, positions and blocks."""
    driver = stream_driver(tiny_model_path)
    outputs = launched_ahead(driver, 3, 12)
    assert are_equal(outputs, expected)
    recorded = graphs_of(driver)._recorded
    assert 4 in [kind.size for kind in recorded] and all(recorded.values())


@pytest.mark.parametrize("fault", ["scores", "tables", "tokens"])
def test_each_part_of_a_recorded_step_counts(
    fault: str,
    tiny_model_path: Path,
    expected: list[pb.Generations],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Detects scores overwritten by the next step, tables that are not sent, and tokens that are
    not read from the device."""
    driver = stream_driver(tiny_model_path)
    runner: Any = driver.engine.runner
    if fault == "scores":
        monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)
    elif fault == "tables":
        monkeypatch.setattr(type(runner._rows), "send", lambda *_: None)
    else:
        where = torch.where

        def other(condition: Tensor, here: Tensor, there: Any) -> Tensor:
            is_ids = isinstance(there, Tensor)
            return there.clamp(min=0) if is_ids else where(condition, here, there)

        monkeypatch.setattr(torch, "where", other)
    assert not are_equal(launched_ahead(driver, 3, 12), expected)


def test_a_step_that_can_not_be_recorded_is_computed(
    tiny_model_path: Path,
    expected: list[pb.Generations],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 …")

    driver = stream_driver(tiny_model_path)
    monkeypatch.setattr(graphs_of(driver), "_recorder", refuse)
    with caplog.at_level(logging.WARNING):
        outputs = launched_ahead(driver, 3, 12)
    assert are_equal(outputs, expected)
    (message,) = caplog.messages
    assert "steps of 4 tokens are not recorded" in message and "\n" not in message


def test_the_part_of_block_tables_that_is_sent() -> None:
    """New blocks, whole tables of reused rows, and entries whose upload failed are sent."""
    rows: Any = SimpleNamespace(
        block_tables=np.array([[3, 4, 5], [6, 7, 8]]),
        num_blocks=np.array([2, 1]),
        num_takes=np.array([1, 1]),
        num_cache_blocks=9,
        block_size=16,
    )
    sent: list[list[int]] = []

    def upload(arrays: Any) -> list[torch.Tensor]:
        if rows.num_cache_blocks == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sent.append(arrays[-1].tolist())
        return [torch.from_numpy(item) for item in arrays]

    state = DeviceRows(rows, torch.device("cpu"), upload)
    both = np.array([0, 1])
    state.send(both)
    rows.num_blocks[0] += 1
    rows.num_cache_blocks = 0
    with pytest.raises(torch.OutOfMemoryError):
        state.send(both)
    rows.num_cache_blocks = 9
    state.send(both[1:])
    state.send(both)
    rows.block_tables[1, 0], rows.num_takes[1] = 2, 2
    state.send(both)
    state.send(both)
    assert sent == [[3, 4, 6], [5], [2]]
    assert state.tables.tolist() == [[3, 4, 5], [2, 0, 0], [9, 9, 9]]
    assert state.tables_of(both[1:], 17).tolist() == [[2, 0]]


def test_memory_of_all_graphs_is_told_by_two(tiny_model_path: Path) -> None:
    """Sizes 1, 2 and 4 with contexts of 512 tokens: 100 bytes for the largest, 10 for each other
    one."""
    driver = stream_driver(tiny_model_path)
    graphs, stream = graphs_of(driver), driver.engine.runner.stream  # type: ignore[attr-defined]
    before = stream.num_recorded
    held = {before: 0, before + 1: 100, before + 2: 110}
    assert graphs.bytes_of_all(lambda: held[stream.num_recorded]) == 100 + 10 * 2
    assert not graphs._recorded


@pytest.mark.gpu
def test_graphs_of_a_gpu_give_what_its_operators_give(tiny_model_path: Path) -> None:
    eager, recorded = (
        Driver(load_engine(tiny_model_path, device="cuda", max_batch_size=4, cuda_graphs=sizes))
        for sizes in ((), None)
    )
    plain, outputs = (launched_ahead(driver, 3, 12) for driver in (eager, recorded))
    graphs = graphs_of(recorded)._recorded
    assert 4 in [kind.size for kind in graphs] and all(graphs.values())
    for one, other in zip(plain, outputs, strict=True):
        assert one.token_ids == other.token_ids and one.top_token_ids == other.top_token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
