"""Random schemas and regular expressions: random allowed tokens become what they describe."""

import json
import random
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
    max_examples=500,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def texts_of() -> Callable[[Asked, int], list[str]]:
    """Texts of a grammar, with the fewest tokens and with some more."""
    compiler = GrammarCompiler(EMBEDDED, 4096, [2, 0])
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))

    def texts(asked: Asked, seed: int) -> list[str]:
        grammar = compiler.compile_now(write(asked))
        assert not grammar.error, grammar.error
        draw = random.Random(seed)
        rooms = (grammar.min_tokens, grammar.min_tokens + 1, grammar.min_tokens + 16)
        written = [list(grammar.ending), *(walk(grammar, room, draw) for room in rooms)]
        return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in written]

    return texts


@EXAMPLES
@given(source=regular_expressions, seed=st.integers(0, 9))
def test_regular_expressions(
    texts_of: Callable[[Asked, int], list[str]], source: str, seed: int
) -> None:
    for text in texts_of(Asked("regex", source), seed):
        assert regex.fullmatch(source, text, regex.V1), f"{source!r}: {text!r}"


@EXAMPLES
@given(schema=schemas, seed=st.integers(0, 9))
def test_schemas(texts_of: Callable[[Asked, int], list[str]], schema: Schema, seed: int) -> None:
    checker = Draft202012Validator(schema, format_checker=FORMATS)
    for text in texts_of(Asked("json_schema", json.dumps(schema)), seed):
        errors = [error.message for error in checker.iter_errors(json.loads(text))]
        assert not errors, f"{schema}: {text}: {errors}"
