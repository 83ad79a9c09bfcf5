"""Random schemas and regular expressions: random allowed tokens become what they describe. Of 100,
one may have no text that is found."""

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from text_generation_router.grammar import write
from text_generation_router.request import Grammar as Asked
from text_generation_shard.grammars.compiler import GrammarCompiler
from tokenizers import Tokenizer

from shard.tests.grammar_formats import FORMATS
from shard.tests.grammars.test_grammar import EMBEDDED, walk
from shard.tests.random_grammars import Schema, regular_expressions, schemas

pytestmark = pytest.mark.slow

EXAMPLES = settings(
    max_examples=2 * settings().max_examples,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


Texts = Callable[[Asked, int], list[str]]


@pytest.fixture(scope="module")
def texts_of() -> Texts:
    """Texts of a grammar, with the fewest tokens and with some more; none if none is found."""
    compiler = GrammarCompiler(EMBEDDED, 4096, [2, 0])
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))

    def texts(asked: Asked, seed: int) -> list[str]:
        grammar = compiler.compile_now(write(asked))
        if "tokens was found" in grammar.error:
            return []
        assert not grammar.error, grammar.error
        draw = random.Random(seed)
        rooms = (grammar.min_tokens, grammar.min_tokens + 1, grammar.min_tokens + 16)
        written = [list(grammar.ending), *(walk(grammar, room, draw) for room in rooms)]
        return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in written]

    return texts


def test_regular_expressions(texts_of: Texts) -> None:
    have_texts = Counter[bool]()

    @EXAMPLES
    @given(source=regular_expressions, seed=st.integers(0, 9))
    def check(source: str, seed: int) -> None:
        texts = texts_of(Asked("regex", source), seed)
        have_texts[bool(texts)] += 1
        for text in texts:
            assert regex.fullmatch(source, text, regex.V1), f"{source!r}: {text!r}"

    check()
    assert have_texts[True] > 99 * have_texts[False]


def test_schemas(texts_of: Texts) -> None:
    have_texts = Counter[bool]()

    @EXAMPLES
    @given(schema=schemas, seed=st.integers(0, 9))
    def check(schema: Schema, seed: int) -> None:
        checker = Draft202012Validator(schema, format_checker=FORMATS)
        texts = texts_of(Asked("json_schema", json.dumps(schema)), seed)
        have_texts[bool(texts)] += 1
        for text in texts:
            errors = [error.message for error in checker.iter_errors(json.loads(text))]
            assert not errors, f"{schema}: {text}: {errors}"

    check()
    assert have_texts[True] > 99 * have_texts[False]
