"""Realistic and random grammars: each has a text, or is refused for the expected reason.

`corpus/regexes.txt` and `corpus/schemas.json` hold a part of the reason beside a refused grammar.
Texts are checked by other implementations of regular expressions and schemas. Of 100 random
grammars one may have no text that is found.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from text_generation_router.errors import GrammarError
from text_generation_router.grammar import write
from text_generation_router.request import Grammar as Asked
from text_generation_shard.grammars.grammar import Grammar, GrammarCompiler
from tokenizers import Tokenizer

from shard.tests.driver import compile_now
from shard.tests.grammar_formats import FORMATS
from shard.tests.grammars.test_grammar import EMBEDDED, walk
from shard.tests.random_grammars import Schema, regular_expressions, schemas

CORPUS = Path(__file__).parents[1] / "corpus"
SPARE = (0, 1, 9, 30)
EXAMPLES = settings(
    max_examples=2 * settings().max_examples,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
Texts = Callable[[Asked, int], list[str]]


def regexes() -> list[tuple[str, str]]:
    """Expressions, each with the reason if it is refused."""
    found = []
    for line in (CORPUS / "regexes.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("!\t"):
            _, source, reason = line.split("\t")
            found.append((source, reason))
        elif not line.startswith("# ") or line.startswith("# ["):
            found.append((line, ""))
    return found


SCHEMAS: list[Any] = json.loads((CORPUS / "schemas.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compiled() -> Callable[[Asked], Grammar]:
    compiler = GrammarCompiler(EMBEDDED, 4096, [2, 0])

    def compile_asked(asked: Asked) -> Grammar:
        try:
            return compile_now(compiler, write(asked))
        except GrammarError as error:
            return Grammar(str(error))

    return compile_asked


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


def texts(grammar: Grammar, tokenizer: Tokenizer, seed: int = 1) -> list[str]:
    """The ending that was found, and random texts of few tokens and of more."""
    draw = random.Random(seed)
    written = [walk(grammar, grammar.min_tokens + spare, draw) for spare in SPARE]
    all_tokens = [list(grammar.ending), *written]
    return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in all_tokens]


def test_it_is_large_enough() -> None:
    assert len({source for source, reason in regexes() if not reason}) >= 300
    assert len({name for name, *_ in SCHEMAS}) == len(SCHEMAS)


@pytest.mark.slow
def test_every_regular_expression(
    compiled: Callable[[Asked], Grammar], tokenizer: Tokenizer
) -> None:
    for source, reason in regexes():
        grammar = compiled(Asked("regex", source))
        assert bool(grammar.error) == bool(reason), f"{source}: {grammar.error}"
        assert reason in grammar.error, f"{source}: {grammar.error}"
        if not reason:
            # `regex` does not know how Rust writes codes.
            plain = re.sub(r"\\[xu]\{(\w+)\}", lambda code: chr(int(code[1], 16)), source)
            for text in texts(grammar, tokenizer):
                assert regex.fullmatch(plain, text, regex.V1), f"{source}: {text!r}"


@pytest.mark.parametrize("case", SCHEMAS, ids=[case[0] for case in SCHEMAS])
def test_schema(
    case: list[Any], compiled: Callable[[Asked], Grammar], tokenizer: Tokenizer
) -> None:
    schema, reason = case[1], (*case[2:], "")[0]
    grammar = compiled(Asked("json_schema", json.dumps(schema)))
    assert bool(grammar.error) == bool(reason), grammar.error
    assert reason in grammar.error
    if not reason:
        check_texts(schema, texts(grammar, tokenizer))


def check_texts(schema: Any, written: Sequence[str]) -> None:
    """Each text is of this schema."""
    checker = Draft202012Validator(schema, format_checker=FORMATS)
    for text in written:
        errors = [error.message for error in checker.iter_errors(json.loads(text))]
        assert not errors, f"{schema}: {text}: {errors}"


@pytest.fixture(scope="module")
def texts_of(compiled: Callable[[Asked], Grammar], tokenizer: Tokenizer) -> Texts:
    """Texts of a random grammar; none if none is found."""

    def find(asked: Asked, seed: int) -> list[str]:
        grammar = compiled(asked)
        if "tokens was found" in grammar.error:
            return []
        assert not grammar.error, grammar.error
        return texts(grammar, tokenizer, seed)

    return find


@pytest.mark.slow
def test_random_regular_expressions(texts_of: Texts) -> None:
    have_texts = Counter[bool]()

    @EXAMPLES
    @given(source=regular_expressions, seed=st.integers(0, 9))
    def check(source: str, seed: int) -> None:
        written = texts_of(Asked("regex", source), seed)
        have_texts[bool(written)] += 1
        for text in written:
            assert regex.fullmatch(source, text, regex.V1), f"{source!r}: {text!r}"

    check()
    assert have_texts[True] > 99 * have_texts[False]


@pytest.mark.slow
def test_random_schemas(texts_of: Texts) -> None:
    have_texts = Counter[bool]()

    @EXAMPLES
    @given(schema=schemas, seed=st.integers(0, 9))
    def check(schema: Schema, seed: int) -> None:
        written = texts_of(Asked("json_schema", json.dumps(schema)), seed)
        have_texts[bool(written)] += 1
        check_texts(schema, written)

    check()
    assert have_texts[True] > 99 * have_texts[False]
