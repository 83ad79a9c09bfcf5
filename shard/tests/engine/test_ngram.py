"""Draft tokens change the speed of tokens, never the tokens: found, limited, cut, verified."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from text_generation_proto import pb
from text_generation_shard.engine import planner
from text_generation_shard.engine.planner import Drafter
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.grammars.grammar import GrammarCompiler
from text_generation_shard.parallel import World
from tokenizers import Tokenizer

from integration_tests.schemas import SCHEMAS, check
from shard.tests.driver import Driver, compile_now, new_request, step_of
from shard.tests.grammars.test_grammar import schema_text

# The end token and two others, equally likely: what a row writes repeats, and is drafted often.
FEW = {"do_sample": True, "logit_bias": ((5, 60.0), (6, 60.0), (7, 60.0)), "temperature": 4.0}


def table_of(*rows: list[int]) -> RowTable:
    """Rows with these known tokens; the KV of the last one is not computed."""
    table = RowTable(len(rows), 200, 16, 12)
    for number, ids in enumerate(rows):
        row = table.take(new_request(number, ids, range(12), max_new_tokens=50))
        table.lens[row] = len(ids) - 1
    return table


def draft_tokens_of(table: RowTable, limits: list[int], price: float = 0.01) -> list[list[int]]:
    drafter, rows = Drafter(len(limits), World().broadcast), np.arange(len(limits))
    # Trusted fully, so that only the limits count.
    for _ in range(30):
        drafter.learn(rows, np.ones(len(rows), np.int64), np.ones(len(rows), np.int64))
    counts = drafter.draft(table, rows, np.array(limits), price)
    if counts is None:
        return [[] for _ in limits]
    known = (table.lens + 1).tolist()
    return [
        table.token_ids[row, known[row] : known[row] + count].tolist()
        for row, count in enumerate(counts.tolist())
    ]


def draft_of(drafter: Drafter, table: RowTable, limit: int, price: float) -> int:
    """The number of draft tokens of the only row."""
    rows = np.array([0])
    counts = drafter.draft(table, rows, np.full_like(rows, limit), price)
    return 0 if counts is None else int(counts[0])


def test_where_nothing_repeats_it_is_not_looked_for_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, drafter = table_of(list(range(3, 100))), Drafter(1, World().broadcast)
    searches = mock.Mock(wraps=planner._continuations)
    monkeypatch.setattr(planner, "_continuations", searches)
    for _ in range(100):
        assert drafter.draft(table, np.array([0]), np.array([4]), 0.01) is None
    assert 20 <= searches.call_count <= 24


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        # Nothing occurred before, or only the last token did.
        ([3, 4, 5, 6], []),
        ([3, 4, 5, 3], []),
        ([3], []),
        # What followed two tokens, and not more than followed.
        ([3, 4, 5, 6, 7, 3, 4], [5, 6, 7, 3]),
        # The longest match wins over the latest …
        ([1, 2, 3, 4, 9, 8, 3, 4, 5, 6, 1, 2, 3, 4], [9, 8, 3, 4]),
        # … and the latest among equals.
        ([3, 4, 5, 0, 3, 4, 6, 0, 9, 3, 4], [6, 0, 9, 3]),
        # A repetition goes on in itself.
        ([9, 3, 4, 3, 4, 3, 4], [3, 4, 3, 4]),
        ([9, 5, 5, 5], [5, 5, 5, 5]),
    ],
)
def test_the_draft_is_what_followed_before(ids: list[int], wanted: list[int]) -> None:
    assert draft_tokens_of(table_of(ids), [4]) == [wanted]


def test_drafts_that_do_not_pay_are_tried_now_and_then() -> None:
    table, drafter, rows = table_of([5] * 100), Drafter(1, World().broadcast), np.array([0])
    for price, most in ((0.01, 9), (0.3, 2), (0.5, 1), (0.7, 1)):
        drafter.forget(0)
        assert int(draft_of(drafter, table, 9, price)) == most
    drafter.forget(0)
    # Always right, but a draft token takes as long as a step.
    sizes = []
    for _ in range(90):
        sizes.append(int(draft_of(drafter, table, 9, 1.0)))
        drafter.learn(rows, np.array(sizes[-1:]), np.array(sizes[-1:]))
    assert set(sizes) == {0, 1} and sum(sizes) == 10


def test_wrong_draft_tokens_become_rare_and_right_ones_come_back() -> None:
    """First with a text whose pairs recur at random, then with a repetitive one."""
    table, drafter, rows = table_of([5] * 100), Drafter(1, World().broadcast), np.array([0])
    steps_with_draft_tokens = 0
    for _ in range(500):
        counts = np.array([draft_of(drafter, table, 4, 0.01)])
        steps_with_draft_tokens += int(counts[0] > 0)
        drafter.learn(rows, counts, np.array([0]))
    assert steps_with_draft_tokens <= 11
    sizes = []
    for _ in range(200):
        counts = np.array([draft_of(drafter, table, 4, 0.01)])
        sizes.append(int(counts[0]))
        drafter.learn(rows, counts, counts)
    assert sizes[-20:] == [4] * 20
    drafter.forget(0)
    assert int(draft_of(drafter, table, 4, 0.3)) == 2


def test_a_text_that_repeats_takes_few_steps(driver: Driver) -> None:
    greedy = {"max_new_tokens": 60, "ignore_eos_token": True, "sampling": {"logit_bias": [(7, 90)]}}
    driver.add([driver.request(0, [3, 4], **greedy)])
    driver.run()
    driver.add([driver.request(1, [3, 4], **greedy)])
    steps = 0
    while driver.running:
        driver.step(speculate=4)
        steps += 1
    assert driver.tokens[1] == driver.tokens[0] == [7] * 60
    assert driver.logprobs[1] == pytest.approx(driver.logprobs[0], abs=1e-4)
    assert steps <= 20


@pytest.mark.parametrize("reason", [pb.FINISH_REASON_EOS_TOKEN, pb.FINISH_REASON_STOP_TOKEN])
def test_an_end_token_ends_behind_right_draft_tokens(
    driver: Driver, reason: pb.FinishReason
) -> None:
    """The row repeats itself until min_new_tokens, then can only end, within its draft tokens."""
    end = 0 if reason == pb.FINISH_REASON_EOS_TOKEN else 8
    sampling = {"logit_bias": ((end, 100.0), (7, 60.0))}
    options = {"sampling": sampling, "min_new_tokens": 21, "max_new_tokens": 50}
    options |= {"stop_token_ids": [end]} if end else {}
    driver.add([driver.request(0, [3], **options)])
    while driver.running:
        driver.step(speculate=6)
    assert driver.tokens[0] == [7] * 21 + [end]
    assert driver.reasons[0] == reason
    assert driver.engine.num_rows_taken == 0


@pytest.mark.parametrize("spare", [0, 1, 7, 30])
def test_a_grammar_is_followed_and_ended_as_without_draft_tokens(
    driver: Driver, tiny_model_path: Path, spare: int
) -> None:
    compiler = GrammarCompiler(tiny_model_path, 300, [0, 2])
    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    draw = random.Random(spare)
    schemas = draw.sample(SCHEMAS, 12)
    several = 0
    for number, schema in enumerate(schemas):
        grammar = compile_now(compiler, schema_text(schema))
        options: dict[str, Any] = {
            "grammar": grammar,
            "max_new_tokens": min(300, grammar.min_tokens + spare),
            "sampling": {"do_sample": number % 2 == 0, "seed": number},
            "min_new_tokens": number % 5,
        }
        # The prompt holds a text of the schema, so that there is something to draft.
        prompt = [3, *grammar.ending][-60:]
        driver.add([driver.request(number, prompt, **options)])
        driver.run()
        driver.add([driver.request(100 + number, prompt, **options)])
        while driver.running:
            several += len(driver.step(speculate=4).generations.token_counts)
        assert driver.tokens[100 + number] == driver.tokens[number]
        assert driver.reasons[100 + number] == driver.reasons[number]
        if grammar.min_tokens <= 300:
            # The end token is there where there was room for it.
            written = [token for token in driver.tokens[100 + number] if token not in (0, 2)]
            check(tokenizer.decode(written, skip_special_tokens=False), schema)
    assert several > 0


def test_a_step_sent_ahead_follows_any_result_of_the_previous_step(driver: Driver) -> None:
    """All draft tokens are right: one row has five tokens more by then, the other has ended."""
    options = {"ignore_eos_token": True, "sampling": {"logit_bias": [(7, 90)]}}
    driver.add([driver.request(0, [7] * 25, max_new_tokens=40, **options)])
    driver.add([driver.request(1, [7] * 25, max_new_tokens=5, **options)])
    engine = driver.engine
    # Two blocks hold the 26 tokens, and what is drafted first; three what is drafted behind that.
    first = step_of(engine, **driver.advance({}, speculate=4))
    grown = [(0, driver.free.pop()), (1, driver.free.pop())]
    second = step_of(engine, grown=grown, speculate=4, is_ahead=True)
    before = engine.step(*first)
    assert before.generations.request_ids == [0, 1] and before.batch.request_ids == [0]
    assert before.generations.token_counts == [5, 4] and set(before.generations.token_ids) == {7}
    result = engine.step(*second)
    assert result.generations.request_ids == [0] and result.batch.request_ids == [0]
    assert result.generations.token_ids == [7] * 5
    engine.clear()


def test_blocks_that_are_missing_lower_the_draft(driver: Driver) -> None:
    options = {
        "max_new_tokens": 40,
        "ignore_eos_token": True,
        "sampling": {"logit_bias": [(7, 90)]},
    }
    driver.add([driver.request(0, [7] * 13, **options)])
    # 14 tokens are known, and there is one block of 16: of six draft tokens two have a place.
    result = driver.engine.step(*step_of(driver.engine, speculate=6))
    assert result.generations.token_ids == [7, 7, 7]
    driver.engine.clear()
