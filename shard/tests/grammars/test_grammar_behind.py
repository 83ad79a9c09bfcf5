"""Grammars on a device that runs behind: the same texts while steps and masks are in flight."""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_proto import pb
from text_generation_shard.engine import output
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.step import StepRunner
from text_generation_shard.grammars.grammar import Grammar, GrammarCompiler
from tokenizers import Tokenizer

from integration_tests.schemas import SCHEMAS
from shard.tests.driver import Driver, compile_now, load_engine, step_of
from shard.tests.grammars.test_grammar import schema_text

OTHERS: list[dict[str, Any]] = [
    {"max_new_tokens": 30, "ignore_eos_token": True},
    {"max_new_tokens": 17, "sampling": {"repetition_penalty": 1.3, "top_k": 40, "seed": 8}},
    # The end token and one other: this row ends at an unpredictable step.
    {"sampling": {"do_sample": True, "logit_bias": ((2, 60.0), (6, 60.0)), "temperature": 4.0}},
]


@pytest.fixture(scope="module")
def compiler(tiny_model_path: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tiny_model_path, 300, [0, 2])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def grammars(compiler: GrammarCompiler) -> list[Grammar]:
    schemas = random.Random(5).sample(SCHEMAS, 9)
    return [compile_now(compiler, schema_text(schema)) for schema in schemas]


@pytest.fixture(scope="module")
def plain_engine(tiny_model_path: Path) -> Engine:
    return load_engine(tiny_model_path)


@pytest.fixture(scope="module")
def stream_engine(tiny_model_path: Path) -> Engine:
    return load_engine(tiny_model_path, device="stream")


@pytest.fixture
def plain(plain_engine: Engine) -> Driver:
    plain_engine.clear()
    return Driver(plain_engine)


@pytest.fixture
def stream(stream_engine: Engine) -> Driver:
    stream_engine.clear()
    return Driver(stream_engine)


def alone(driver: Driver, **options: Any) -> list[int]:
    """What request 0 writes alone."""
    driver.add([driver.request(0, [3, 4], **options)])
    driver.run()
    return driver.tokens[0]


def texts(driver: Driver, grammars: Sequence[Grammar], spare: int) -> tuple[Any, ...]:
    """The tokens of requests that arrive one after another, some without a grammar. They may have
    `spare` tokens more than the shortest known text."""
    for number, grammar in enumerate(grammars):
        options = {
            "sampling": {"do_sample": number % 2 == 0, "seed": number},
            "max_new_tokens": min(300, grammar.min_tokens + spare),
            "top_n_tokens": 2 * (number % 2),
        }
        requests = [driver.request(number, [3 + number, 4], grammar=grammar, **options)]
        if number % 3 == 0:
            other = OTHERS[number // 3 % len(OTHERS)]
            requests.append(driver.request(100 + number, [9, number], **other))
        driver.add(requests, driver.advance({}) if driver.running else None)
        for _ in range(3):
            if driver.running:
                driver.step()
    driver.run()
    assert driver.engine.num_rows_taken == 0 and len(driver.reasons) == len(driver.tokens)
    return driver.tokens, driver.logprobs, driver.reasons


@pytest.mark.parametrize("spare", [1, 7, 60])
def test_texts_are_those_of_a_device_that_waits(
    stream: Driver,
    plain: Driver,
    grammars: list[Grammar],
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch, plans = StepRunner.launch, list[Any]()
    was_behind = list[bool]()

    def count(steps: StepRunner, plan: Any) -> Any:
        if steps is stream.engine._steps:
            plans.append(plan)
            knows_tokens = plan.before is None
            is_known = knows_tokens or not steps.table.depend_on_tokens(plan.samples.rows)
            was_behind.append(not is_known and plan.grammars is None)
        return launch(steps, plan)

    monkeypatch.setattr(StepRunner, "launch", count)
    assert texts(stream, grammars, spare) == texts(plain, grammars, spare)
    again = len(plans) - len({id(plan) for plan in plans})
    assert 0 < again <= len(grammars), "a token was replaced, and few steps were computed for it"
    assert sum(was_behind) > (len(plans) / 2 if spare == 60 else 0)


DIGITS = "start: /[0-9]{6}/"
# Strings that are never closed by choice, so that the grammar must close them.
OPEN: dict[str, Any] = {"type": "array", "items": {"type": "string"}}


@pytest.fixture(scope="module")
def open_ended(compiler: GrammarCompiler, tiny_model_path: Path) -> dict[str, Any]:
    """Options of a request whose last tokens its grammar replaces."""
    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    never = {"logit_bias": ((tokenizer.token_to_id("]"), -100.0),)}
    return {
        "grammar": compile_now(compiler, schema_text(OPEN)),
        "sampling": never,
        "max_new_tokens": 9,
    }


def test_a_step_is_answered_while_masks_of_the_next_are_under_way(
    stream: Driver, compiler: GrammarCompiler
) -> None:
    engine, gate = stream.engine, threading.Event()
    stream.add([stream.request(0, [3], grammar=compile_now(compiler, DIGITS))])
    first, second = engine.launch(*step_of(engine)), engine.launch(*step_of(engine))
    assert second.plan.grammars is None, "the token before is not known"
    engine._masks._thread.submit(gate.wait, 20)
    assert first.result().generations.request_ids == [0]
    grammars: Any = second.plan.grammars
    assert grammars is not None and not grammars._job.done()
    gate.set()
    assert second.result().generations.request_ids == [0]


def test_a_step_that_can_not_be_launched_again_is_lost_alone(
    stream: Driver,
    plain: Driver,
    open_ended: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = alone(plain, **open_ended)
    launch, launched = StepRunner.launch, list[Any]()

    def once(steps: StepRunner, plan: Any) -> Any:
        if plan in launched:
            raise RuntimeError("the device says no")
        launched.append(plan)
        return launch(steps, plan)

    stream.add([stream.request(0, [3, 4], **open_ended)])
    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "launch", once)
        with pytest.raises(RuntimeError, match="says no"):
            stream.run()
    assert 0 < len(stream.tokens[0]) < len(wanted) and stream.engine.num_rows_taken == 1
    stream.run()
    assert stream.tokens[0] == wanted


LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos_token": True}
# Its only token is the end.
ENDING: dict[str, Any] = {"logit_bias": ((2, 1000.0),)}


def test_a_grammar_follows_its_own_tokens(stream: Driver, compiler: GrammarCompiler) -> None:
    """Also if the row in front of it ended in the previous step, and is dropped."""
    engine, grammar = stream.engine, compile_now(compiler, "start: /[0-4]{3}/")
    old = stream.request(0, range(3, 12), max_new_tokens=30, sampling=ENDING, min_new_tokens=1)
    engine.step(*step_of(engine, [old], runs_on=False))
    new = stream.request(1, range(30, 50), grammar=grammar)
    handles = [engine.launch(*step_of(engine)), stream.launch([new])]
    ended, found = (handle.result() for handle in handles)
    assert ended.generations.finish_reasons == [pb.FINISH_REASON_EOS_TOKEN]
    assert found.generations.request_ids == [1] and not found.errors


def test_a_forced_token_leaves_the_scores_alone(
    plain: Driver, open_ended: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device their memory may hold those of the next step by then."""
    verify, seen = output.verify, list[Any]()

    def compare(plan: Any, choice: Any, *rest: Any) -> Any:
        before = torch.as_tensor(choice.scores).clone()
        found = verify(plan, choice, *rest)
        seen.append((torch.equal(before, torch.as_tensor(choice.scores)), found.output.generations))
        return found

    monkeypatch.setattr("text_generation_shard.engine.engine.verify", compare)
    alone(plain, **open_ended, top_n_tokens=3)
    assert all(is_same for is_same, _ in seen)
    # The forced token is the only one that is told.
    assert [found.top_token_counts for _, found in seen][-2] == [1]
    assert seen[-2][1].top_token_ids == seen[-2][1].token_ids
    assert seen[-2][1].top_token_logprobs == [0.0]
