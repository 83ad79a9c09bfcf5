"""Grammars in the engine: every text follows its grammar, regardless of batch composition."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from text_generation_proto import pb
from text_generation_shard.grammars.ending import allowed_tokens
from text_generation_shard.grammars.grammar import Grammar, GrammarCompiler
from text_generation_shard.grammars.masks import Constraint
from tokenizers import Tokenizer

from integration_tests.schemas import check, closed
from shard.tests.driver import Driver, compile_now, errors_of

EMBEDDED = Path(__file__).parents[3] / "launcher/text_generation_launcher/embedded_model"
WHITESPACE = {"whitespace_flexible": False, "whitespace_pattern": "[\\x20]?"}
PERSON = closed(name={"type": "string"}, age={"type": "integer", "minimum": 0})
DRAWN: dict[str, Any] = {"do_sample": True, "seed": 3}


def schema_text(schema: dict[str, Any]) -> str:
    """A schema in the router's form."""
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": WHITESPACE}}]})


@pytest.fixture(scope="module")
def compiler(tiny_model_path: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model_path, 300, [0, 2])


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))


def allowed(constraint: Constraint) -> list[int]:
    assert constraint.matcher is not None
    return allowed_tokens(constraint.matcher.compute_bitmask())


def walk(grammar: Grammar, max_new_tokens: int, draw: random.Random) -> list[int]:
    """A text of random allowed tokens, without the end token."""
    constraint = Constraint(grammar, (), max_new_tokens, 0)
    written: list[int] = []
    while not constraint.failure and len(written) < max_new_tokens:
        token = constraint.settle(draw.choice(allowed(constraint)))
        if token in grammar.eos_ids:
            break
        written.append(token)
    assert not constraint.failure
    return written


def test_the_engine_writes_what_the_schema_says_beside_others_it_does_not_change(
    driver: Driver, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    person = compile_now(compiler, schema_text(PERSON))
    free = {"max_new_tokens": 30, "ignore_eos_token": True}
    driver.add([driver.request(0, [9, 8, 7], **free), driver.request(1, [5, 6], **free)])
    driver.run()
    alone = {0: driver.tokens[0], 1: driver.tokens[1]}
    driver = Driver(driver.engine)
    driver.add([driver.request(0, [9, 8, 7], **free)])
    constrained = {"grammar": person, "max_new_tokens": 40}
    # Two sequences of one prompt and a third that is filtered out while it runs.
    driver.add(
        [driver.request(n, [3, 4], sampling={**DRAWN, "seed": n}, **constrained) for n in (7, 8)]
    )
    driver.step()
    driver.add([driver.request(9, [3], **constrained), driver.request(1, [5, 6], **free)])
    driver.step()
    driver.drop(9)
    driver.run()
    assert {0: driver.tokens[0], 1: driver.tokens[1]} == alone
    assert driver.tokens[7] != driver.tokens[8]
    for request_id in (7, 8):
        check(tokenizer.decode(driver.tokens[request_id]), PERSON)
    assert driver.engine.num_rows_taken == 0
    assert not driver.engine._table.constraints


@pytest.mark.parametrize("max_new_tokens", [24, 60])
def test_a_preempted_text_goes_on_as_without_preemption(
    driver: Driver, compiler: GrammarCompiler, max_new_tokens: int
) -> None:
    options = {
        "grammar": compile_now(compiler, schema_text(PERSON)),
        "sampling": DRAWN,
        "max_new_tokens": max_new_tokens,
    }
    driver.add([driver.request(0, [3, 4], **options)])
    driver.run()
    driver.add([driver.request(1, [3, 4], **options)])
    while 1 in driver.running:
        driver.step()
        driver.settle()
        if 1 in driver.running:
            known = driver.drop(1)
            driver.add([driver.request(1, known, num_prompt_tokens=2, **options)])
    assert driver.tokens[1] == driver.tokens[0]
    assert driver.reasons[1] == driver.reasons[0]


def test_the_grammar_decides_about_end_tokens(driver: Driver, compiler: GrammarCompiler) -> None:
    digits = compile_now(compiler, "start: /[0-9]{1,12}/")
    wants_end = {"logit_bias": ((0, 100.0),)}
    cases: list[dict[str, Any]] = [{}, {"min_new_tokens": 5}, {"ignore_eos_token": True}]
    for request_id, options in enumerate(cases):
        driver.add(
            [
                driver.request(
                    request_id,
                    [3],
                    grammar=digits,
                    sampling=wants_end,
                    max_new_tokens=20,
                    **options,
                )
            ]
        )
        driver.run()
        assert driver.tokens[request_id][-1] == 0
    assert [len(driver.tokens[n]) for n in range(3)] == [2, 6, 13]
    assert {driver.reasons[n] for n in range(3)} == {pb.FINISH_REASON_EOS_TOKEN}


def test_a_text_that_is_brought_to_its_end_was_cut(
    driver: Driver, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    # A spare token: the end token is not the last one allowed.
    strings = compile_now(compiler, schema_text({"type": "array", "items": {"type": "string"}}))
    never_closes = {"logit_bias": ((tokenizer.token_to_id("]"), -100.0),)}
    driver.add([driver.request(0, [3], grammar=strings, sampling=never_closes, max_new_tokens=9)])
    driver.run()
    json.loads(tokenizer.decode(driver.tokens[0]))
    assert driver.reasons[0] == pb.FINISH_REASON_LENGTH
    assert driver.logprobs[0][-2] == 0.0, "the forced token was the only choice"


def test_a_request_that_fails_fails_alone(driver: Driver, compiler: GrammarCompiler) -> None:
    digits = compile_now(compiler, "start: /[0-9]+/")
    driver.add([driver.request(0, [3], max_new_tokens=6, ignore_eos_token=True)])
    broken = driver.request(1, [3], grammar=compile_now(compiler, "start: nothing"))
    # What it says it has generated is not what its grammar allows.
    stranger = driver.request(2, [3, 50, 51], num_prompt_tokens=1, grammar=digits)
    healthy = driver.request(3, [3], grammar=digits)
    result = driver.add([broken, stranger, healthy])
    failed, goes_on = pb.FINISH_REASON_ERROR, pb.FINISH_REASON_NONE
    assert result.generations.finish_reasons == [failed, failed, goes_on]
    errors = errors_of(result)
    assert 'unknown name: "nothing"' in errors[1] and "generated before" in errors[2]
    driver.run()
    assert len(driver.tokens[0]) == 6 and len(driver.tokens[3]) == 8


def test_logprobs_are_those_among_the_allowed_tokens(
    driver: Driver, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compile_now(compiler, "start: /[0-4]/")
    result = driver.add([driver.request(0, [3], grammar=grammar, top_n_tokens=300)]).generations
    assert {tokenizer.id_to_token(token) for token in result.top_token_ids} == set("01234")
    assert math.fsum(map(math.exp, result.top_token_logprobs)) == pytest.approx(1.0)
    assert result.logprobs[0] == pytest.approx(result.top_token_logprobs[0])


def test_a_grammar_that_can_not_be_written_is_one_sentence(
    compiler: GrammarCompiler, tmp_path: Path
) -> None:
    endless = compile_now(compiler, 'start: "a" start')
    assert endless.error.startswith("no text matches it")
    assert endless.min_tokens == 0
    nested = compile_now(compiler, "start: /((((a{1,99}){1,99}){1,99}){1,99}b){1,99}/")
    assert "\n" not in nested.error
    without = compile_now(GrammarCompiler(tmp_path, 300, [0]), "start: /a/")
    assert "grammars do not work with this model's tokenizer.json" in without.error
    small = compile_now(GrammarCompiler(EMBEDDED, 10, [0]), "start: /a/")
    assert "vocab size too small" in small.error


def test_a_tokenizer_with_more_ids_than_the_model(tiny_model_path: Path, tmp_path: Path) -> None:
    content = json.loads((tiny_model_path / "tokenizer.json").read_text())
    more = content["added_tokens"][-1] | {"id": 5000, "content": "<|more|>"}
    content["added_tokens"].append(more)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    compiler = GrammarCompiler(tmp_path, 300, [0])
    try:
        assert not compile_now(compiler, '{"grammars": [{"lark_grammar": "start: /ab/"}]}').error
    finally:
        compiler.close()
