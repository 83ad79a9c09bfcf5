"""Trials: the cost of a hostile grammar, which requests it delays, and that it leaves nothing."""

import asyncio
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from text_generation_shard.grammars.compiler import Grammar, GrammarCompiler
from text_generation_shard.grammars.constraint import Constraint, GrammarError, sentence
from text_generation_shard.grammars.guard import (
    LOST,
    AnyConstraint,
    Guard,
    GuardedConstraint,
    GuardedGrammar,
    begin,
    pack,
)
from text_generation_shard.grammars.masks import ConstrainedRow, GrammarMasks
from text_generation_shard.grammars.trial import may_grow
from tokenizers import Tokenizer

from integration_tests.schemas import check, closed
from shard.tests.test_grammar import EMBEDDED, schema_text

VOCAB_SIZE = 4096


def all_of(number: int, form: str = "a{}") -> str:
    """A schema that intersects patterns: 26 exceed the memory limit."""
    patterns = [{"type": "string", "pattern": form.format(n)} for n in range(number)]
    return schema_text({"allOf": patterns})


def hidden(number: int) -> str:
    """A schema that compiles fast, as its shortest text has no `b`. The mask at the start of the
    value of `b` exceeds the memory limit."""
    patterns = [{"type": "string", "pattern": f"^(z{{0,3}}|y.*a{n}.*)$"} for n in range(number)]
    properties = {"a": {"type": "null"}, "b": {"allOf": patterns}}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    return schema_text({**schema, "additionalProperties": False})


def regex(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{text}/"}]})


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(EMBEDDED, VOCAB_SIZE, [2, 0])
    yield compiler
    compiler.close()
    assert not servers()


def servers() -> list[psutil.Process]:
    """This process's own trial servers; other tests have launchers."""
    name = "text_generation_shard.grammars.trial_server"
    return [child for child in psutil.Process().children() if name in child.cmdline()]


def children() -> list[psutil.Process]:
    """The processes of trials."""
    return [child for server in servers() for child in server.children()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_too_large_is_refused_and_nothing_goes_on(compiler: GrammarCompiler) -> None:
    own = psutil.Process().memory_info().rss
    for text in (all_of(26), all_of(200), regex("a{1000000}")):
        began = time.monotonic()
        grammar = await compiler.compile(text)
        assert grammar.error.endswith("smaller") and not grammar.retry_after_s
        assert time.monotonic() - began < 10
        await until(lambda: not children())
    assert psutil.Process().memory_info().rss < own + (50 << 20)
    # It is known now.
    began = time.monotonic()
    assert (await compiler.compile(all_of(26))).error
    assert time.monotonic() - began < 0.1


async def test_small_ones_do_not_wait_and_the_third_large_one_is_refused_for_now(
    compiler: GrammarCompiler,
) -> None:
    hostile = [asyncio.create_task(compiler.compile(all_of(30 + n))) for n in range(8)]
    small = []
    while not all(task.done() for task in hostile):
        began = time.monotonic()
        grammar = await compiler.compile(regex(f"[0-9]{{{len(small) + 2}}}"))
        assert not grammar.error
        small.append(time.monotonic() - began)
        await asyncio.sleep(0.1)
    assert len(small) > 2 and max(small) < 5, small
    ended = [task.result() for task in hostile]
    assert all(grammar.error for grammar in ended)
    assert sum(not grammar.retry_after_s for grammar in ended) <= 4
    # The one that waits for another small grammar.
    await until(lambda: len(children()) == 1)


async def test_a_child_tries_small_grammars_one_after_another(compiler: GrammarCompiler) -> None:
    for count in range(2, 12):
        assert not (await compiler.compile(regex(f"[0-9]{{{count}}}"))).error
    [child] = children()
    guarded = await compiler.compile(
        schema_text({"patternProperties": {"^a": {"minLength": 5000}}})
    )
    assert isinstance(guarded, GuardedGrammar), "it has taken the child"
    assert not (await compiler.compile(regex("[a-z]{2}"))).error
    assert len(children()) == 2
    for one in children():
        one.kill()
    await until(lambda: not children())
    assert not (await compiler.compile(regex("[a-z]{3}"))).error, "a new child tries it"
    assert child not in children()


async def test_a_child_that_has_tried_many_ends(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("text_generation_shard.grammars.trial._MOST_TRIED", 3)
    seen = set()
    for count in range(2, 9):
        await compiler.compile(regex(f"[0-9]{{{count}}}"))
        seen |= {child.pid for child in children()}
    assert 2 <= len(seen) <= 3


async def test_what_a_child_has_tried_counts_for_no_other_grammar(
    compiler: GrammarCompiler,
) -> None:
    for count in range(2, 6):
        await compiler.compile(regex(f"[0-9]{{{count}}}"))
    assert "too" in (await compiler.compile(all_of(26))).error
    assert not (await compiler.compile(regex("[0-9]{9}"))).error


async def test_concurrent_calls_share_a_trial_that_ends_with_the_last_of_them(
    compiler: GrammarCompiler,
) -> None:
    asked = [asyncio.create_task(compiler.compile(all_of(60))) for _ in range(3)]
    await until(lambda: len(children()) == 1)
    child = children()[0]
    for task in asked[:2]:
        task.cancel()
    await asyncio.wait(asked[:2])
    await until(lambda: child.cpu_times().user > 0.1)
    assert [child] == children(), "one still waits"
    asked[2].cancel()
    await until(lambda: not children())


async def test_a_waiting_call_fails_when_the_server_dies_and_it_is_restarted(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trial must still run when the server is killed, also if this machine stands still.
    monkeypatch.setattr("text_generation_shard.grammars.trial._MOST_CPU_S", 60.0)
    monkeypatch.setattr("text_generation_shard.grammars.trial._LONGEST_S", 60.0)
    asked = asyncio.create_task(compiler.compile(all_of(40)))
    await until(lambda: len(children()) == 1)
    [server] = servers()
    os.kill(server.pid, signal.SIGKILL)
    assert (await asked).retry_after_s
    assert not (await compiler.compile(regex("[0-9]{2}"))).error


async def test_a_trial_waits_while_the_tokenizer_is_loaded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "text_generation_shard.grammars.trial"
    monkeypatch.setattr(f"{limits}._LONGEST_S", 0.1)
    monkeypatch.setattr(f"{limits}._LOADING_S", 60.0)
    compiler.start()
    await until(lambda: bool(servers()))
    [server] = servers()
    server.suspend()
    asked = asyncio.create_task(compiler.compile(regex("[0-9]{2}")))
    assert not (await asyncio.wait([asked], timeout=0.5))[0]
    monkeypatch.setattr(f"{limits}._LONGEST_S", 60.0)
    server.resume()
    assert not (await asked).error


async def test_closing_ends_running_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing else ends it, also if the processor's clock runs ahead while the machine stands still.
    monkeypatch.setattr("text_generation_shard.grammars.trial._MOST_CPU_S", 60.0)
    monkeypatch.setattr("text_generation_shard.grammars.trial._LONGEST_S", 60.0)
    compiler = GrammarCompiler(EMBEDDED, VOCAB_SIZE, [2, 0])
    asked = [asyncio.create_task(compiler.compile(all_of(40 + n))) for n in range(2)]
    await until(lambda: len(children()) == 2)
    began = time.monotonic()
    compiler.close()
    assert time.monotonic() - began < 2
    assert not servers()
    for task in asked:
        assert (await task).retry_after_s


async def test_what_is_remembered_is_bounded_in_bytes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("text_generation_shard.grammars.compiler._CACHED_BYTES", 30 << 20)
    for number in range(8):
        text = all_of(2, f"^z{number}[a-z]*y{{}}?$")
        grammar = await compiler.compile(text)
        assert isinstance(grammar, GuardedGrammar)
    del grammar
    gc.collect()
    await until(lambda: len(children()) <= 5)
    assert len(children()) >= 2


async def test_a_model_without_a_usable_tokenizer(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, 300, [0])
    grammar = await compiler.compile(regex("a"))
    assert "grammars do not work with this model's tokenizer.json" in grammar.error
    compiler.close()


PERSON = closed(
    name={"type": "string", "pattern": "^[a-z]{2,9}$"},
    id={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
)


def masks_of(item: AnyConstraint, guesses: list[int]) -> list[list[int]]:
    masks = GrammarMasks(VOCAB_SIZE, torch.device("cpu"))
    step = masks.start([ConstrainedRow(item, 0, guesses)])
    assert step is not None
    logits = torch.zeros(len(guesses) + 1, VOCAB_SIZE)
    step.restrict(logits)
    return [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]


@pytest.mark.parametrize("max_new_tokens", [28, 60])
async def test_a_guarded_grammar_does_what_one_here_does(
    compiler: GrammarCompiler, max_new_tokens: int
) -> None:
    guarded = await compiler.compile(schema_text(PERSON))
    here = compiler.compile_now(schema_text(PERSON))
    assert isinstance(guarded, GuardedGrammar) and not here.error
    assert guarded.min_tokens == here.min_tokens <= max_new_tokens
    rows = [begin(grammar, (), max_new_tokens, 5) for grammar in (guarded, here)]
    assert [type(row) for row in rows] == [GuardedConstraint, Constraint]
    written: list[int] = []
    seen: list[Any] = []
    token = -1
    while token not in here.eos_ids:
        guess = [written[-1]] if written else []
        assert len({tuple(row.allowed(guess)) for row in rows}) == 1
        guess = list(rows[0].allowed(guess))
        seen = [masks_of(row, guess) for row in rows]
        assert seen[0] == seen[1]
        token = seen[0][0][len(written) * 7 % len(seen[0][0])]
        tokens = {row.settle(token) for row in rows}
        assert len(tokens) == 1
        token = tokens.pop()
        written.append(token)
        assert [row.failure for row in rows] == ["", ""]
    assert rows[0].is_driven == rows[1].is_driven
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    check(tokenizer.decode(written), PERSON)
    # A preempted one goes on where it was.
    again = [begin(grammar, written[:4], max_new_tokens, 5) for grammar in (guarded, here)]
    assert masks_of(again[0], []) == masks_of(again[1], [])


@pytest.mark.parametrize(("each_look_s", "is_killed"), [(0.0, False), (0.03, True)])
def test_a_paused_machine_is_no_slow_grammar(
    monkeypatch: pytest.MonkeyPatch, each_look_s: float, is_killed: bool
) -> None:
    """The clock of a process that ran goes on while a virtual machine is paused."""
    looks = iter([10.0, 10.0, *(15.0 + number * each_look_s for number in range(1000))])
    killed: list[bool] = []
    monkeypatch.setattr("text_generation_shard.grammars.guard.cpu_s", lambda process: next(looks))
    ours, theirs = socket.socketpair()
    with theirs:
        guard = Guard(ours, 1, lambda: killed.append(True))
        # The total is not what is tested here.
        guard._allowed_s = 100.0
        answer = threading.Timer(0.2, theirs.sendall, [pack("masks")])
        answer.start()
        if is_killed:
            with pytest.raises(GrammarError, match="the next tokens take too long"):
                guard.ask("masks")
        else:
            assert guard.ask("masks") == "masks"
        answer.join()
    assert killed == [True] * is_killed


async def test_what_blows_up_while_it_is_followed_fails_alone_and_soon(
    compiler: GrammarCompiler,
) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    masks = GrammarMasks(VOCAB_SIZE, torch.device("cpu"))
    hostile = await compiler.compile(hidden(26))
    assert isinstance(hostile, GuardedGrammar) and hostile.guard is not None, hostile.error
    hostile.guard._is_again = True
    other = await compiler.compile(schema_text(PERSON))
    before, row, behind, innocent = (
        begin(grammar, (), 100, 0) for grammar in (hostile, hostile, hostile, other)
    )
    began = time.monotonic()
    for token in tokenizer.encode('{"a":null,"b":"', add_special_tokens=False).ids:
        row.settle(token)
        # Masks of several rows, one of which ends their process.
        step = masks.start(
            [ConstrainedRow(item, n, ()) for n, item in enumerate((before, row, behind))]
        )
        assert step is not None and step.masks() is not None
        if row.failure:
            break
    assert "too complex to be followed" in row.failure
    assert time.monotonic() - began < 5
    assert masks_of(innocent, []) and not innocent.failure
    assert (before.failure, behind.failure) == ("", LOST), "another row has ended their process"
    assert step is not None and step.failures() == {1: row.failure, 2: ""}
    again = await compiler.compile(hidden(26))
    assert again is not hostile and masks_of(begin(again, (), 100, 0), [])
    await until(lambda: len(children()) == 2)


@pytest.mark.parametrize("pattern", ["([^x]{1000000})?", "(([^x]{100}){100}){100}?|a"])
async def test_repeats_that_are_reached_with_the_first_token_delay_no_request(
    compiler: GrammarCompiler, pattern: str
) -> None:
    """In this process they would block. Compiling is fast: the shortest text has no repeats."""
    grammar = await compiler.compile(regex(pattern))
    assert isinstance(grammar, GuardedGrammar), grammar.error
    for room in (24, 4096):
        row = begin(grammar, (), room, 0)
        began = time.monotonic()
        token = row.settle(masks_of(row, [])[0][-1])
        assert time.monotonic() - began < 0.5
        # It can not be ended in so few tokens, and is not begun.
        assert token in grammar.eos_ids or grammar.ending == (token,)
        assert not row.failure


@pytest.mark.parametrize(
    "text",
    [
        regex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}"),
        regex("(a{9}){9}b{,5}[{]2000000"),
        schema_text(closed(a={"type": "string", "maxLength": 4000}, b={"const": 2000000})),
    ],
)
def test_what_is_ordinary_is_not_guarded(text: str) -> None:
    assert not may_grow(text)


@pytest.mark.parametrize(
    "text",
    [
        regex("a{5000}"),
        regex("a{2,5000}"),
        regex("a{5000,}"),
        regex("a{,5000}"),
        regex("(a{70}b){70}"),
        regex("a{99999999999999999999999999}"),
        "start: a ~ 5000",
        "start: a ~ 1..5000",
        schema_text(closed(a={"type": "string", "maxLength": 5000})),
    ],
)
def test_what_is_repeated_often_may_grow(text: str) -> None:
    assert may_grow(text)


async def test_a_released_row_is_forgotten(compiler: GrammarCompiler) -> None:
    guarded = await compiler.compile(schema_text(PERSON))
    row: AnyConstraint = begin(guarded, (), 60, 0)
    number = row.row if isinstance(row, GuardedConstraint) else 0
    del row
    gc.collect()
    assert isinstance(guarded, GuardedGrammar) and guarded.guard is not None
    assert list(guarded.guard._forgotten) == [number]
    other = begin(guarded, (), 60, 0)
    assert not other.failure and not guarded.guard._forgotten


def test_an_error_shows_little_of_a_pattern() -> None:
    shown = sentence("Unable to determine: " + "secret " * 500 + " is empty")
    assert len(shown) < 220 and shown.startswith("Unable") and shown.endswith("is empty")


def test_a_grammar_that_fails_is_no_grammar() -> None:
    assert begin(Grammar("reason"), (), 5, 0).failure == "reason"
