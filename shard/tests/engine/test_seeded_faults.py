"""Typical mistakes in running behind: with each of them the same requests give other results, so
that the tests over the stream would fail."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.planner import Planner
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.grammars.compiler import GrammarCompiler
from text_generation_shard.grammars.masks import GrammarMasks, StepGrammars

from shard.tests.driver import Driver, load_engine
from shard.tests.grammars.test_grammar import PERSON, schema_text
from shard.tests.stream_device import LateBuffer, LateStream

Seed = Callable[[pytest.MonkeyPatch], None]
LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos_token": True}
# A row that ends, which is not known before, in front of those with a grammar.
ENDING: dict[str, Any] = {"sampling": {"logit_bias": ((2, 99.0),)}, "min_new_tokens": 7}


def texts(driver: Driver, compiler: GrammarCompiler) -> Any:
    """Rows that end, one after another, beside two that follow a grammar, one to its limit."""
    person = compiler.compile_now(schema_text(PERSON))
    driver.add(
        [driver.request(0, [9, 8], **LONG), driver.request(1, [7], max_new_tokens=40, **ENDING)]
    )
    driver.step()
    for number, spare in ((2, 120), (3, 1)):
        options = {"grammar": person, "max_new_tokens": person.min_tokens + spare}
        new = [
            driver.request(number, [3, number], sampling={"do_sample": True}, **options),
            driver.request(10 + number, [5, number], max_new_tokens=4),
        ]
        driver.add(new, driver.advance({}))
        for _ in range(5):
            driver.step()
    driver.run()
    return driver.tokens, driver.logprobs, driver.reasons


def results_are_read_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateStream, "mark", lambda _: SimpleNamespace(synchronize=lambda: None))


def buffers_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateBuffer, "wait", lambda _: None)


def rows_are_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    launch = Engine.launch

    def drop(self: Engine, *args: Any) -> Any:
        handle, table = launch(self, *args), self._table
        rows = table.running
        table.release(rows[table.lens[rows] + 1 >= table.longest[rows]].tolist())
        return handle

    patch.setattr(Engine, "launch", drop)


def masks_are_those_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    start, jobs = GrammarMasks.start, list[Any]()

    def late(self: GrammarMasks, rows: Any) -> Any:
        found = start(self, rows)
        if found is not None:
            jobs.append(found._job)
            # The step does not wait for this job, and two threads must not use one matcher.
            found._job.result()
            found._job = jobs[-2:][0]
        return found

    patch.setattr(GrammarMasks, "start", late)


def masks_begin_at_launch(patch: pytest.MonkeyPatch) -> None:
    plan, start = Planner.plan, Planner.start_grammars

    def begin(self: Planner, *args: Any) -> Any:
        made = plan(self, *args)
        self.start_grammars(made)
        if made.grammars is not None:
            made.grammars.masks()
        return made

    patch.setattr(Planner, "plan", begin)
    patch.setattr(Planner, "start_grammars", lambda self, made: made.grammars or start(self, made))


def places_are_not_counted_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepGrammars, "keep", lambda *_: None)


def replaced_tokens_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "drive", lambda *_: None)


FAULTS: list[Seed] = [
    results_are_read_early,
    buffers_are_not_waited_for,
    rows_are_dropped_at_launch,
    masks_are_those_of_the_step_before,
    masks_begin_at_launch,
    places_are_not_counted_anew,
    replaced_tokens_are_not_noticed,
]


@pytest.fixture(scope="module")
def compiler(tiny_model_path: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model_path, 300, [0, 2])


@pytest.fixture(scope="module")
def wanted(compiler: GrammarCompiler, tiny_model_path: Path) -> Any:
    """The results of a device that does not run behind."""
    return texts(Driver(load_engine(tiny_model_path)), compiler)


def test_without_a_fault_all_is_right(
    compiler: GrammarCompiler, wanted: Any, tiny_model_path: Path
) -> None:
    assert texts(Driver(load_engine(tiny_model_path, device="stream")), compiler) == wanted


@pytest.mark.parametrize("seed", FAULTS)
def test_a_fault_is_noticed(
    seed: Seed,
    compiler: GrammarCompiler,
    wanted: Any,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(load_engine(tiny_model_path, device="stream"))
    seed(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        assert texts(driver, compiler) == wanted
