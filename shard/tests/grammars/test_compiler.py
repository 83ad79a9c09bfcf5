"""Trials of grammars: what a hostile grammar costs, which requests it delays, what it leaves."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
from text_generation_process.worker import WorkerError
from text_generation_shard.grammars import grammar as compiling
from text_generation_shard.grammars.grammar import Grammar, GrammarCompiler, Tried, source_of
from text_generation_shard.grammars.masks import Constraint

from integration_tests.schemas import closed
from integration_tests.server import workers_of
from shard.tests.driver import compile_now
from shard.tests.grammars.test_grammar import EMBEDDED, schema_text


def regex(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{text}/"}]})


def slow(number: int) -> str:
    """A grammar that takes four seconds to try: each of its patterns may exclude each other."""
    patterns = {f"^(.*a{at}.*)-{number}{at}$": {"type": "null"} for at in range(220)}
    return schema_text({"type": "object", "patternProperties": patterns})


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(EMBEDDED, 4096, [2, 0])
    yield compiler
    await asyncio.to_thread(compiler.close)
    assert not workers()


def workers() -> list[psutil.Process]:
    """The processes that try grammars."""
    return workers_of("text_generation_shard.grammars.grammar")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_grammar_that_takes_too_long_is_refused_and_others_for_now(
    compiler: GrammarCompiler,
) -> None:
    assert not (await compiler.compile(regex("[0-9]"))).error
    hostile = [asyncio.create_task(compiler.compile(slow(number))) for number in range(5)]
    longest = 0.0
    while not all(task.done() for task in hostile):
        began = time.monotonic()
        assert not (await compiler.compile(regex(f"a{time.monotonic_ns()}"))).error
        longest = max(longest, time.monotonic() - began)
    assert longest < 2.0, "small grammars do not wait"
    refused = [task.result() for task in hostile]
    assert 1 <= [grammar.retry_after_s > 0 for grammar in refused].count(True) < 5
    assert {grammar.error.rpartition("; ")[2] for grammar in refused} == {
        "make it smaller",
        "try again later",
    }


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_a_trial_whose_process_dies_is_repeated_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, num_deaths: int
) -> None:
    call, asked = compiler._worker.call, list[str]()

    def dying(kind: str, *values: Any) -> bytes:
        asked.append(kind)
        if len(asked) <= num_deaths:
            raise WorkerError("the process died")
        return call(kind, *values)

    monkeypatch.setattr(compiler._worker, "call", dying)
    grammar = await compiler.compile(regex("[0-9]{2}"))
    assert asked == ["short", "long"] and bool(grammar.error) == (num_deaths == 2)
    assert not grammar.error or "takes too long or needs too much memory" in grammar.error


async def test_concurrent_calls_share_a_trial(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, asked = compiler._try, list[str]()

    def count(kind: str, text: str) -> Tried:
        asked.append(text)
        return tried(kind, text)

    monkeypatch.setattr(compiler, "_try", count)
    tasks = [asyncio.create_task(compiler.compile(regex("[a-z]{3}"))) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    first, second = await asyncio.gather(*tasks[1:])
    assert first is second and not first.error and len(asked) == 1


async def test_closing_ends_running_trials() -> None:
    compiler = GrammarCompiler(EMBEDDED, 4096, [2, 0])
    asked = asyncio.create_task(compiler.compile(slow(0)))
    await until(lambda: len(workers()) == 2)
    began = time.monotonic()
    await asyncio.to_thread(compiler.close)
    assert time.monotonic() - began < 2 and not workers()
    assert (await asked).retry_after_s


@pytest.mark.parametrize(("limit", "value"), [("_CACHED_BYTES", 200), ("_CACHED_GRAMMARS", 4)])
async def test_remembered_grammars_are_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(compiling, limit, value)
    first = await compiler.compile(regex("a"))
    assert await compiler.compile(regex("a")) is first
    for number in range(4):
        await compiler.compile(regex(f"b{number}"))
    assert len(compiler._known) < 5 and await compiler.compile(regex("a")) is not first


@pytest.mark.parametrize("pattern", ["([^x]{1000000})?", "(([^x]{100}){100}){100}?|a"])
def test_repeats_that_can_not_be_ended_are_not_begun(pattern: str) -> None:
    compiler = GrammarCompiler(EMBEDDED, 4096, [2, 0])
    grammar = compile_now(compiler, regex(pattern))
    if grammar.error:
        assert "repeated more than 20000 times" in grammar.error
        return
    for room in (24, 4096):
        row = Constraint(grammar, (), room, 0)
        assert row.matcher is not None
        began = time.monotonic()
        token = row.settle(4)
        assert time.monotonic() - began < 0.5
        assert not row.failure and (token in grammar.eos_ids or grammar.ending == (token,))


def test_another_rank_accepts_what_is_chosen() -> None:
    elsewhere = Constraint(Grammar(), (), 5, 0)
    assert elsewhere.settle(7) == 7 and elsewhere.allowed([1, 2]) == [1, 2]
    assert elsewhere.may_end_after(0) and not elsewhere.failure


def test_the_source_of_a_schema_has_its_patterns() -> None:
    schema = closed(a={"type": "string", "pattern": r"^\d/é$"})
    assert r'"pattern":"^\d\/é$"' in source_of(schema_text(schema))
    assert source_of('start: "a"') == 'start: "a"'
