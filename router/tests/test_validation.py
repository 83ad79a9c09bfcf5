"""Every rule, its sentence, and the order in which they are tried."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from text_generation_router.errors import AdapterNotFoundError, ValidationError
from text_generation_router.grammar import GrammarCompiler
from text_generation_router.metrics import Metrics
from text_generation_router.request import Grammar, Request
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.validation import (
    GenerateParameters,
    Limits,
    Validation,
    check_first,
)

from router.tests.serving import BOS_ID, ScriptedShards, script_of, write_tokenizer

LIMITS = Limits(
    max_best_of=2,
    max_stop_sequences=4,
    max_top_n_tokens=5,
    max_input_tokens=9,
    max_total_tokens=12,
    vocab_size=258,
)


NO_GRAMMARS = GrammarCompiler(ScriptedShards(()), is_enabled=False)


@pytest.fixture
def validation(tmp_path: Path) -> Validation:
    write_tokenizer(tmp_path)
    return Validation(LIMITS, Tokenizer.load(tmp_path), Metrics(9, 12), NO_GRAMMARS)


async def validate(validation: Validation, inputs: str = "ab", **asked: object) -> Request:
    return await validation.validate(GenerateParameters.of(inputs=inputs, **asked))


REFUSED = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"temperature": 0.0, "best_of": 2}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": math.nan}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"presence_penalty": -2.5}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": math.nan}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"min_p": math.nan}, "`min_p` must be > 0.0 and <= 1.0"),
    (
        {"stop_token_ids": (3, 258)},
        "`stop_token_ids` must be token ids >= 0 and below 258, the size of the vocabulary. "
        "Given: 258",
    ),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ("x",) * 100}, "`stop` supports up to 4 stop sequences. Given: 100"),
    (
        {"seed": 1, "best_of": 2, "do_sample": True},
        "`seed` must not be set when `best_of` > 1",
    ),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    (
        {"logit_bias": {258: 1.0}},
        "`logit_bias` must name token ids below 258, the size of the vocabulary. Given: 258",
    ),
    (
        {"logit_bias": {7: 101.0}},
        "`logit_bias` must be >= -100.0 and <= 100.0. Given: 101.0 for 7",
    ),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 9. Given: 0"),
    ({"truncate": 10}, "`truncate` must be strictly positive and less than 9. Given: 10"),
    (
        {"max_new_tokens": 10},
        "`inputs` tokens + `max_new_tokens` must be <= 12. "
        "Given: 3 `inputs` tokens and 10 `max_new_tokens`",
    ),
    (
        {"inputs": "a" * 9, "max_new_tokens": 1},
        "`inputs` must have less than 9 tokens. Given: 10",
    ),
    (
        {"inputs": "a" * 11},
        "`inputs` tokens + `max_new_tokens` must be <= 12. "
        "Given: 12 `inputs` tokens and 1 `max_new_tokens`",
    ),
    (
        {"min_new_tokens": 3, "max_new_tokens": 2},
        "`min_new_tokens` must be <= `max_new_tokens`. Given: 3 and 2",
    ),
    ({"grammar": Grammar("regex", "a")}, "grammar is not supported"),
    ({"input_ids": ()}, "`inputs` cannot be empty"),
    ({"input_ids": (1,) * 10}, "`inputs` must have less than 9 tokens. Given: 10"),
    (
        {"input_ids": (1, 258)},
        "`inputs` must be token ids >= 0 and below 258, the size of the vocabulary. Given: 258",
    ),
    (
        {"input_ids": (-1,)},
        "`inputs` must be token ids >= 0 and below 258, the size of the vocabulary. Given: -1",
    ),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
async def test_refused(validation: Validation, asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        await validate(validation, **asked)
    assert str(caught.value) == sentence
    assert caught.value.message == f"Input validation error: {sentence}"


async def test_first_failing_rule_is_told(validation: Validation) -> None:
    asked: dict[str, object] = {"adapter_id": "x", "inputs": "", "top_k": 0, "temperature": 0.0}
    for expected in ("temperature", "top_k", "inputs", "adapter_id"):
        with pytest.raises((ValidationError, AdapterNotFoundError), match=f"`{expected}`"):
            await validate(validation, **asked)
        del asked[expected]


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ({}, (BOS_ID, *script_of("ab"))),
        ({"inputs": "abcdefghijklmnopqrstuvwxyz", "truncate": 3}, script_of("xyz")),
        ({"inputs": "abcdefghijkl", "truncate": -1, "max_new_tokens": 5}, script_of("fghijkl")),
        ({"inputs": "", "input_ids": (0, 257, 5)}, (0, 257, 5)),
        ({"inputs": "", "input_ids": (0, 257, 5), "truncate": 2}, (257, 5)),
    ],
)
async def test_prompts_and_defaults(
    validation: Validation, asked: dict[str, object], ids: Sequence[int]
) -> None:
    request = await validate(validation, **asked)
    assert request.input_ids == tuple(ids)
    assert request.max_new_tokens == asked.get("max_new_tokens", 12 - len(ids))
    assert not request.asked.top_n_tokens and not request.sampling.is_sampling
    assert (await validate(validation, **asked)).sampling.seed != request.sampling.seed
    assert (await validate(validation, seed=2**64 - 1, **asked)).sampling.seed == 2**64 - 1


async def test_limits_are_inclusive(validation: Validation) -> None:
    request = await validate(
        validation,
        inputs="a" * 8,
        max_new_tokens=3,
        min_new_tokens=3,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        top_p=0.99,
        stop=("a",) * 4,
        top_n_tokens=5,
        truncate=9,
        logit_bias={257: -100.0},
    )
    assert len(request.input_ids) == 9
    assert request.max_new_tokens == 3
    assert request.sampling.logit_bias == ((257, -100.0),)


async def test_a_grammar_needs_room_for_its_shortest_text(tmp_path: Path) -> None:
    shards = ScriptedShards(())
    write_tokenizer(tmp_path)
    grammars = GrammarCompiler(shards, is_enabled=True)
    validation = Validation(LIMITS, Tokenizer.load(tmp_path), Metrics(9, 12), grammars)
    grammar = Grammar("regex", "abc")
    shards.min_tokens = 4
    with pytest.raises(ValidationError) as error:
        await validate(validation, grammar=grammar, max_new_tokens=3)
    assert str(error.value) == (
        "`max_new_tokens` must be >= 4, the tokens that the shortest text of this grammar needs. "
        "Given: 3"
    )
    request = await validate(validation, grammar=grammar, max_new_tokens=4)
    assert request.grammar == shards.grammars[0]
    # What does not fit anyway is not compiled.
    with pytest.raises(ValidationError, match="`inputs` tokens"):
        await validate(validation, grammar=Grammar("regex", "x"), max_new_tokens=400)
    assert len(shards.grammars) == 1


async def test_ids_that_only_the_tokenizer_has_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    limits = replace(LIMITS, vocab_size=tokenizer.id_of("c") or 0)
    validation = Validation(limits, tokenizer, Metrics(9, 12), NO_GRAMMARS)
    assert limits.vocab_size <= BOS_ID
    with pytest.raises(ValidationError, match=rf"which this model does not have.*Given: {BOS_ID}"):
        await validate(validation, "ab")
    assert (await validate(validation, "ab", add_special_tokens=False)).input_ids
    with pytest.raises(ValidationError, match="`inputs` has the token 'c'"):
        await validate(validation, "abc", add_special_tokens=False)


STREAM = "is not supported when streaming tokens"


@pytest.mark.parametrize(
    ("given", "max_best_of", "is_stream", "sentence"),
    [
        ({"best_of": 0}, 2, True, f"`best_of` != 1 {STREAM}"),
        ({"decoder_input_details": True}, 2, True, f"`decoder_input_details` == true {STREAM}"),
        ({"best_of": 2}, 1, False, "`best_of` != 1 is not allowed for this endpoint"),
        ({"best_of": 3}, 2, False, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 0}, 2, False, "`best_of` must be > 0 and <= 2. Given: 0"),
    ],
)
def test_streams_and_best_of(
    given: dict[str, object], max_best_of: int, is_stream: bool, sentence: str
) -> None:
    limits = replace(LIMITS, max_best_of=max_best_of)
    check_first(asked(best_of=1), limits, is_stream)
    with pytest.raises(ValidationError) as caught:
        check_first(asked(**given), limits, is_stream)
    assert str(caught.value) == sentence


def asked(**parameters: object) -> GenerateParameters:
    return GenerateParameters.of(inputs="x", **parameters)


async def test_deterministic_is_refused_where_it_can_not_be_kept(validation: Validation) -> None:
    await validate(validation, deterministic=True)
    validation.limits = replace(LIMITS, is_deterministic=False)
    with pytest.raises(ValidationError, match="`deterministic` can not be kept"):
        await validate(validation, deterministic=True)
