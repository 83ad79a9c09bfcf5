"""A device that runs behind: steps are launched before the tokens of previous steps are known."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from text_generation_process.flags import ShardConfig
from text_generation_proto import pb
from text_generation_shard.device.cuda.runner import StreamStep
from text_generation_shard.engine.engine import Engine, StepHandle
from text_generation_shard.service import Batch, Begun, ShardService

from shard.tests.driver import Driver, changed, load_engine, prefill_of, step_of

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 1.2, "seed": 4},
    {"repetition_penalty": 1.3, "top_k": 40, "seed": 8},
    # The end token and one other: this row ends at an unpredictable step.
    {"do_sample": True, "logit_bias": ((2, 60.0), (6, 60.0)), "temperature": 4.0, "seed": 3},
]


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> dict[str, Engine]:
    """By name; cleared before each test."""
    devices = {"plain": "cpu", "stream": "stream"}
    return {name: load_engine(tiny_model_path, device=own) for name, own in devices.items()}


@pytest.fixture
def plain(engines: dict[str, Engine]) -> Driver:
    engines["plain"].clear()
    return Driver(engines["plain"])


@pytest.fixture
def driver(engines: dict[str, Engine]) -> Driver:
    """An engine on a device that runs behind."""
    engines["stream"].clear()
    return Driver(engines["stream"])


def tokens_of(driver: Driver, behind: bool) -> dict[int, list[int]]:
    """Requests that arrive one after another; each step is launched before the previous one is
    collected, if the device allows it."""
    engine, waiting = driver.engine, list[StepHandle]()
    found: dict[int, list[int]] = {}

    def collect(handle: StepHandle) -> None:
        output = handle.result().generations
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            found.setdefault(request_id, []).append(token)
        for request_id, reason in zip(output.request_ids, output.finish_reasons, strict=True):
            if reason != pb.FINISH_REASON_NONE:
                driver.reasons[request_id] = reason

    for step in range(40):
        new = []
        if step % 3 == 0 and step < 12:
            number = step // 3
            prompt = [3 + (5 * number + at) % 90 for at in range(7 + 9 * number)]
            options = {"max_new_tokens": 6 + 5 * number, "sampling": SAMPLINGS[number]}
            request = driver.request(number, prompt, **options)
            new = [changed(request, block_table=range(8 * number, 8 * number + 8))]
        if not new and len(driver.reasons) == 4:
            break
        launched = False
        if new or engine.num_rows_taken:
            try:
                waiting.append(engine.launch(*step_of(engine, new, runs_on=step > 0)))
                launched = True
            except ValueError as error:
                # All that run end in the step that is under way.
                assert behind and waiting and "every request rests" in str(error)
        while len(waiting) > behind or (waiting and not launched):
            collect(waiting.pop(0))
            launched = True
    return found


def test_a_choice_that_depends_on_tokens_waits_for_them(driver: Driver) -> None:
    engine = driver.engine
    first = engine.launch(
        *step_of(engine, [driver.request(0, range(3, 20), max_new_tokens=30)], False)
    )
    second = engine.launch(*step_of(engine))
    assert first.outcome is None, "both are under way"
    third = engine.launch(*step_of(engine))
    assert first.outcome is not None and second.outcome is None, "no more than two are"
    engine.launch(*step_of(engine, speculate=2))
    assert third.outcome is not None, "draft tokens are made of tokens that are known"
    for handle in (first, second, third):
        assert len(handle.result().generations.token_ids) == 1
    engine.clear()
    assert engine.num_rows_taken == 0


LONG: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos_token": True}


@pytest.fixture(scope="module")
def wanted(engines: dict[str, Engine]) -> list[int]:
    """The tokens of one request on a device that does not run behind."""
    driver = Driver(engines["plain"])
    driver.add([driver.request(0, range(3, 20), **LONG)])
    driver.run()
    return driver.tokens[0]


def test_a_step_that_fails_late_leaves_what_was_there(
    driver: Driver, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = driver.engine
    driver.add([driver.request(0, range(3, 20), **LONG)])
    handle = engine.launch(*step_of(engine, [driver.request(1, [4, 5])], runs_on=True))
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "logits", lambda *_: 1 / 0)
        launched: Any = handle.launched
        if launched is not None:
            # All was given to the device; it says late what it could not do.
            lost = StreamStep(lambda: 1 / 0)
            patch.setattr(launched, "_launched", lost)
            handle.wait()
        with pytest.raises(ZeroDivisionError):
            handle.result()
    with pytest.raises(ZeroDivisionError):
        handle.result()
    assert engine.num_rows_taken == 1
    driver.run()
    assert driver.tokens[0] == wanted


def test_steps_behind_one_that_fails_are_lost_with_it(
    driver: Driver, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.add([driver.request(0, range(3, 20), **LONG)])
    first, second = (
        driver.engine.launch(*step_of(driver.engine)),
        driver.engine.launch(*step_of(driver.engine)),
    )
    lost = SimpleNamespace(result=lambda: 1 / 0)
    monkeypatch.setattr(first, "launched", lost)
    for handle in (first, second):
        with pytest.raises(ZeroDivisionError):
            handle.result()
    driver.run()
    assert driver.tokens[0] == wanted


# Its only token is the end.
ENDING: dict[str, Any] = {"logit_bias": ((2, 1000.0),)}


def with_one_that_ended(driver: Driver, new: pb.Request) -> pb.Generations:
    """The tokens of a step with a new request, launched behind a step in which another request
    takes part that ended in the step before."""
    engine = driver.engine
    both = [
        driver.request(0, range(3, 12), max_new_tokens=30, sampling=ENDING, min_new_tokens=2),
        driver.request(1, range(5, 9), max_new_tokens=30, ignore_eos_token=True),
    ]
    engine.step(*step_of(engine, both, runs_on=False))
    engine.step(*step_of(engine))
    handles = [engine.launch(*step_of(engine)), engine.launch(*step_of(engine))]
    handles.append(engine.launch(*step_of(engine, [new])))
    ended, behind, last = (handle.result().generations for handle in handles)
    assert ended.finish_reasons[0] == pb.FINISH_REASON_EOS_TOKEN and behind.request_ids == [1]
    return last


def test_the_row_of_an_ended_request_leaks_nothing_to_its_next_request(
    driver: Driver, plain: Driver
) -> None:
    found = with_one_that_ended(driver, driver.request(2, range(30, 50)))
    step = step_of(plain.engine, [plain.request(2, range(30, 50))], runs_on=False)
    expected = plain.engine.step(*step).generations
    assert found.request_ids[-1] == 2 and found.token_ids[-1] == expected.token_ids[0]
    assert found.logprobs[-1] == pytest.approx(expected.logprobs[0], abs=1e-4)


def test_a_step_behind_a_prompt_brings_none_of_its_log_probabilities(driver: Driver) -> None:
    engine = driver.engine
    request = driver.request(0, range(3, 12), prefill_logprobs=True)
    handles = [
        engine.launch(*step_of(engine, [request], runs_on=False)),
        engine.launch(*step_of(engine)),
    ]
    first, second = (handle.result() for handle in handles)
    [found] = first.prefill_logprobs
    assert (found.request_id, len(found.logprobs)) == (0, 9)
    assert second.generations.request_ids == [0] and not second.prefill_logprobs


@pytest.mark.parametrize("name", ["plain", "stream"])
@pytest.mark.parametrize("speculate", [0, 2])
def test_a_step_ahead_of_the_end_is_no_failure(
    name: str, speculate: int, engines: dict[str, Engine]
) -> None:
    """It is sent and launched before the previous step shows that all requests have ended."""
    engine = engines[name]
    engine.clear()
    driver, batch = Driver(engine), Batch(engine)
    new = driver.request(0, range(3, 12), max_new_tokens=30, sampling=ENDING, min_new_tokens=1)
    batch.finish(batch.prefill(prefill_of(engine, 1, [new]), {}))
    last = batch.decode([1], step_of(engine)[0])
    ahead = batch.decode([1], step_of(engine, speculate=speculate, is_ahead=True)[0])
    assert batch.finish(last).generations.finish_reasons == [pb.FINISH_REASON_EOS_TOKEN]
    answer = batch.finish(ahead)
    assert not answer.generations.request_ids and not answer.HasField("batch")
    assert batch.id is None and engine.num_rows_taken == 0


async def test_a_step_whose_call_ended_is_collected(driver: Driver, tiny_model_path: Path) -> None:
    engine, request = driver.engine, driver.request(0, [4, 5], max_new_tokens=1)
    service = ShardService(engine, ThreadPoolExecutor(1), ShardConfig(model_path=tiny_model_path))
    batch, is_collected = service._batch, threading.Event()
    finish = batch.finish

    def tell(begun: Begun | None, number: int = 0) -> pb.StepResponse:
        answer = finish(begun, number)
        is_collected.set()
        return answer

    batch.finish = tell  # type: ignore[method-assign]
    message = prefill_of(engine, 7, [request])
    call = service._compute("Prefill", message, partial(batch.prefill, message, {}))
    await asyncio.sleep(0)
    call.cancel()
    assert await asyncio.to_thread(is_collected.wait, 20)
    assert batch.id is None and engine.num_rows_taken == 0
    service.close()
