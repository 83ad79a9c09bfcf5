"""Models with a recurrent state per row: each request gets the tokens that it gets alone."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from text_generation_proto import pb
from text_generation_shard.device.base import MemoryBudget
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.warmup import warm_up
from text_generation_shard.errors import BatchError, ModelError

from shard.tests.driver import (
    DEVICES,
    NUM_BLOCKS,
    Driver,
    changed,
    errors_of,
    limits_of,
    reference_device,
    step_of,
)
from shard.tests.driver import load_engine as load
from shard.tests.engine.test_mixed_steps import make_wanted, run_mixed
from shard.tests.running_hash import with_states
from shard.tests.stream_device import StreamDevice

LONG: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos_token": True}
PROMPT = [3 + (7 * place + place * place) % 250 for place in range(70)]
LIMITS = limits_of(23, 8, max_total_tokens=400, max_batch_total_tokens=NUM_BLOCKS * 16)


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest, tiny_model_path: Path) -> Engine:
    """Its passes have at most 23 tokens."""
    stateful = with_states(load(tiny_model_path, device=request.param))
    warm_up(stateful, LIMITS)
    return stateful


def stored(*stores: tuple[int, int]) -> dict[str, Any]:
    """Options of a request whose state is stored: (after so many tokens, as this snapshot)."""
    positions, places = zip(*stores, strict=True)
    return {"snapshot_positions": positions, "snapshot_places": places}


def alone(driver: Driver, ids: Sequence[int]) -> list[int]:
    driver.add([driver.request(1000, ids, **LONG)])
    driver.run()
    return driver.tokens.pop(1000)


def behind(driver: Driver, leader: pb.Request, num_cached: int, snapshot: int) -> pb.Request:
    """A request for the same text that begins behind cached tokens of another."""
    number, shared = max(driver.tokens) + 1, num_cached // driver.engine.block_size
    request = driver.request(number, leader.input_ids, **LONG)
    table = [*leader.block_table[:shared], *request.block_table[shared:]]
    return changed(request, block_table=table, num_cached_tokens=num_cached, snapshot=snapshot)


def test_the_state_follows_its_row_whatever_a_step_mixes(engine: Engine) -> None:
    """Joined, left, in chunks, preempted, in rows of others, with draft tokens asked for."""
    draw = random.Random(2)
    requests = make_wanted(Driver(engine), draw, 8)
    driver = Driver(engine)
    run_mixed(driver, requests, draw)
    assert [driver.tokens[number] for number in range(8)] == [one.tokens for one in requests]


@pytest.mark.parametrize("chunk_len", [0, 40])
def test_a_request_begins_from_a_snapshot_in_any_row(driver: Driver, chunk_len: int) -> None:
    wanted = alone(driver, PROMPT)
    leader = driver.request(1, PROMPT, **stored((32, 0), (64, 1)), chunk_len=chunk_len, **LONG)
    driver.add([leader])
    if chunk_len:
        driver.step({1: 30})
    driver.step()
    driver.add([behind(driver, leader, num_cached=32, snapshot=0)], driver.advance({}))
    driver.add([behind(driver, leader, num_cached=64, snapshot=1)], driver.advance({}))
    driver.run()
    assert driver.tokens == dict.fromkeys((1, 2, 3), wanted)


def test_a_snapshot_is_read_in_the_step_that_replaces_it(driver: Driver) -> None:
    wanted = alone(driver, PROMPT)
    leader = driver.request(1, PROMPT, **stored((64, 0)), **LONG)
    driver.add([leader])
    heir = behind(driver, leader, num_cached=64, snapshot=0)
    other = driver.request(3, PROMPT[::-1], **stored((16, 0)), **LONG)
    driver.add([heir, other], driver.advance({}))
    late = behind(driver, other, num_cached=16, snapshot=0)
    driver.add([late], driver.advance({}))
    driver.run()
    assert driver.tokens[1] == driver.tokens[2] == wanted
    assert driver.tokens[3] == driver.tokens[4] == alone(driver, PROMPT[::-1])


def test_a_new_engine_computes_the_same_again(driver: Driver) -> None:
    """What was generated is a part of the input, as after a lost shard; snapshots are gone."""
    wanted = alone(driver, PROMPT)
    warm_up(driver.engine, LIMITS)
    driver = Driver(driver.engine)
    again = driver.request(1, [*PROMPT, *wanted[:4]], num_prompt_tokens=len(PROMPT), **LONG)
    driver.add([again])
    driver.run()
    assert driver.tokens[1] == wanted[4:]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"snapshot": 999}, "begin from snapshot 999 and .*: there are 400 snapshots"),
        (stored((16, 400)), r"stored as \(tokens, snapshot\) \[\(16, 400\)\]: there are 400"),
        (stored((80, 0)), r"70 tokens, 0 of them cached, .* \[\(80, 0\)\]"),
        (stored((32, 0), (16, 1)), r"\[\(32, 0\), \(16, 1\)\]"),
    ],
)
def test_snapshots_that_can_not_be_are_refused(
    driver: Driver, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BatchError, match=sentence):
        driver.add([driver.request(1, PROMPT, **changes)])
    assert driver.engine.num_rows_taken == 0


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("the device says no")])
def test_a_failed_step_ends_all_that_it_computed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Some states may have advanced. A row that rested is as it was."""
    wanted = alone(driver, PROMPT)
    driver.add([driver.request(1, PROMPT, chunk_len=20, **LONG)])
    driver.add([driver.request(2, [5, 6], **LONG)], driver.advance({}))
    model: Any = driver.engine.model

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", fail)
        step = step_of(driver.engine, [driver.request(3, PROMPT, **LONG)])
        if isinstance(error, MemoryError):
            result = driver.engine.step(*step)
            assert errors_of(result).keys() == {2, 3} and result.batch.request_ids == [1]
            assert "its state is lost, behind 2 of its tokens" in errors_of(result)[2]
            assert result.generations.finish_reasons == [pb.FINISH_REASON_ERROR] * 2
        else:
            with pytest.raises(RuntimeError, match="says no"):
                driver.engine.step(*step)
    driver.running = [1]
    assert driver.engine.num_rows_taken == 1
    driver.step({1: 50})
    driver.run()
    assert driver.tokens[1] == wanted


def test_no_step_runs_behind_another_or_as_a_graph(tiny_model_path: Path) -> None:
    device = reference_device(StreamDevice, cuda_graphs=(1, 8))
    plain = load(tiny_model_path, device=device)
    assert plain.runs_behind and plain.runner.records_steps
    stateful = with_states(plain)
    assert not stateful.runs_behind and not stateful.runner.records_steps


def test_snapshots_take_a_share_of_the_memory(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth at most, and no more of them than blocks."""
    budget = MemoryBudget(cache=6_500_000, step=0)
    monkeypatch.setattr(engine.model, "state_bytes", 100_000, raising=False)
    monkeypatch.setattr(engine.device, "free_bytes", lambda *_: budget)
    limits = limits_of(64, 4, max_total_tokens=400)
    with caplog.at_level(logging.INFO):
        result = warm_up(engine, limits)
    assert 7 <= result.num_snapshots == len(engine.model.snapshots) <= 8
    [line] = [line for line in caplog.messages if line.startswith("memory: states")]
    assert f"0.001 GB  {result.num_snapshots} snapshots" in line
    block_bytes = result.kv_cache_bytes // result.num_blocks
    asked = limits_of(64, 4, max_batch_total_tokens=budget.cache // block_bytes * 16)
    with pytest.raises(ModelError, match="but there is room for"):
        warm_up(engine, asked)
    monkeypatch.setattr(engine.model, "state_bytes", 8)
    result = warm_up(engine, limits)
    assert result.num_snapshots == result.num_blocks == 100
