"""Scores that are not finite: only their request fails, with a sentence."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_generation_proto import pb
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.output import verify
from text_generation_shard.engine.planner import Plan, verified_tokens
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.grammars.grammar import GrammarCompiler
from text_generation_shard.parallel import World
from text_generation_shard.sampling import Choice

from integration_tests.checkpoints import damage
from shard.tests.driver import (
    Driver,
    compile_now,
    errors_of,
    load_engine,
    new_request,
    reference_device,
)

BAD = 77
"""The token whose embedding is NaN."""
SENTENCE = "the model's scores for the next token are not numbers (NaN or infinite)"
REQUESTS: list[dict[str, Any]] = [
    {},
    {"sampling": {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "seed": 5}},
    {"sampling": {"repetition_penalty": 1.2, "top_k": 9, "seed": 6}, "top_n_tokens": 3},
    {"prefill_logprobs": True},
]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "reference"])
def engine(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Engine:
    """Engines of a model with one NaN embedding: with the kernels, and with torch's operators."""
    source = checkpoint("llama3-untied")
    folder = tmp_path_factory.mktemp("damaged") / "model"
    damaged = damage(source, folder, "model.embed_tokens.weight", BAD)
    if request.param == "reference":
        return load_engine(damaged, device=reference_device())
    return load_engine(damaged, dtype=request.param)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    engine.clear()
    return Driver(engine)


def good_ids(number: int) -> list[int]:
    return [3 + (number * 7 + place) % 60 for place in range(5 + number)]


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("bad_options", REQUESTS)
def test_one_row_fails_and_no_other_changes(
    driver: Driver, speculate: int, bad_options: dict[str, Any]
) -> None:
    """The other requests' tokens and log-probabilities are bit for bit the same as without it."""
    options = [{**item, "max_new_tokens": 9, "ignore_eos_token": True} for item in REQUESTS]
    # Only our kernels guarantee this; torch's operators may differ with the number of rows.
    is_exact = driver.engine.is_deterministic
    for number, item in enumerate(options):
        driver.add([driver.request(number, good_ids(number), **item)])
        driver.run()
    tokens, logprobs = dict(driver.tokens), dict(driver.logprobs)
    bad = {**bad_options, "max_new_tokens": 9}
    for number, item in enumerate(options):
        first = driver.add([driver.request(100 + number, good_ids(number), **item)])
        assert not first.errors
        result = driver.add([driver.request(200 + number, [5, 6, BAD], **bad)], driver.advance({}))
        assert errors_of(result) == {200 + number: SENTENCE}
        place = list(result.generations.request_ids).index(200 + number)
        assert result.generations.finish_reasons[place] == pb.FINISH_REASON_ERROR
        assert 200 + number not in result.batch.request_ids
        while driver.running:
            assert not driver.step(speculate=speculate).errors
        if is_exact:
            assert driver.tokens[100 + number] == tokens[number]
            assert driver.logprobs[100 + number] == logprobs[number]
    assert driver.engine.num_rows_taken == 0


def test_a_prompt_in_parts_fails_with_its_last(driver: Driver) -> None:
    request = driver.request(1, [5, *good_ids(9), BAD], chunk_len=4, max_new_tokens=9)
    driver.add([driver.request(0, good_ids(2), ignore_eos_token=True)])
    assert not driver.add([request], driver.advance({})).errors
    result = driver.step({1: driver.left[1]})
    assert errors_of(result) == {1: SENTENCE}
    assert result.batch.request_ids == [0]


def test_a_row_that_comes_upon_it_later_fails_then(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = {"logit_bias": ((BAD, 100.0),)}
    first = driver.add([driver.request(0, good_ids(3), sampling=sampling)])
    assert driver.tokens[0] == [BAD] and not first.errors
    with caplog.at_level(logging.WARNING):
        assert errors_of(driver.step()) == {0: SENTENCE}
    assert caplog.messages[0].startswith(f"1 of 1 requests failed in this step: {SENTENCE}")
    assert not driver.running


def test_a_grammar_does_not_hide_it(engine: Engine, driver: Driver, tiny_model_path: Path) -> None:
    model = engine.model.config
    compiler = GrammarCompiler(tiny_model_path, model.vocab_size, model.eos_token_ids)
    try:
        grammar = compile_now(compiler, "start: /[0-4]{3}/")
    finally:
        compiler.close()
    driver.add([driver.request(0, [5, 6], grammar=grammar)])
    result = driver.add([driver.request(1, [5, BAD], grammar=grammar)], driver.advance({}))
    assert errors_of(result) == {1: SENTENCE}


def test_a_model_without_any_scores_starts_and_fails_each_request(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = damage(checkpoint("llama3-untied"), tmp_path / "model", "model.norm.weight", None)
    driver = Driver(load_engine(path))
    result = driver.add([driver.request(n, good_ids(n)) for n in range(5)])
    assert errors_of(result) == dict.fromkeys(range(5), SENTENCE)
    assert not result.batch.request_ids


@pytest.mark.parametrize(("bad", "fails"), [(0, True), (1, True), (2, False), (3, True)])
def test_behind_a_wrong_draft_nothing_counts(bad: int, fails: bool) -> None:
    """A row with two draft tokens, the second of which is wrong, and a row without draft tokens."""
    table = RowTable(2, 100, 16, 20)
    for number in range(2):
        table.take(new_request(number, [4], range(4), max_new_tokens=50))
    table.token_ids[0, 1:3] = 7, 8
    rows, none = np.array([0, 1]), np.zeros(2, np.int64)
    plan = Plan(table, [verified_tokens(rows, none, np.array([2, 0]))])
    logprobs = np.full(4, -1.0, np.float32)
    logprobs[bad] = np.nan
    choice = Choice(np.array([7, 9, 10, 11]), logprobs, np.zeros((4, 50), np.float32))
    result = verify(plan, choice, 0, table, frozenset([0]), World()).output
    assert errors_of(result) == ({0 if bad < 3 else 1: SENTENCE} if fails else {})
    wanted = [pb.FINISH_REASON_NONE, pb.FINISH_REASON_NONE]
    if fails:
        wanted[0 if bad < 3 else 1] = pb.FINISH_REASON_ERROR
    assert result.generations.finish_reasons == wanted
