"""Spellings of regular expressions: what is the same is written as Rust's, else it is refused."""

import re

import pytest
from text_generation_router.errors import GrammarError
from text_generation_router.grammar import write
from text_generation_router.regular import RegularError, rust
from text_generation_router.request import Grammar


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("a{,3}", "a{0,3}"),
        (r"\{,3}", r"\{,3}"),
        (r"a\Z", r"a\z"),
        (r"\\Z", r"\\Z"),
        ("(?#why)a", "a"),
        ("[(?#]+", "[(?#]+"),
        (r"a\++", r"a\++"),
        ("[*+]+[]+]+[^]?+]+", "[*+]+[]+]+[^]?+]+"),
        ("[[:alpha:]+]+", "[[:alpha:]+]+"),
        ("a+?b*?c{2}?", "a+?b*?c{2}?"),
        ("[", "["),
        ("(?#", "(?#"),
        # Read once, however much is not closed.
        ("[" * 60_000, "[" * 60_000),
        ("(?#" * 20_000, "(?#" * 20_000),
    ],
    ids=range(14),
)
def test_what_is_the_same(source: str, written: str) -> None:
    assert rust(source) == written


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a++", "possessive repetitions are not supported; write `+` in place of `++`"),
        (r"\\?+", "possessive"),
        ("[a]*+", "possessive"),
        ("a{2,}+", "write `{2,}`"),
        ("(?>a)", "atomic groups"),
        ("(?P<a>x)(?P=a)", "backreferences"),
        (r"(?<a>x)\k<a>", "backreferences"),
        ("(a)?(?(1)b|c)", "conditions"),
    ],
)
def test_what_would_be_read_as_something_else(source: str, reason: str) -> None:
    with pytest.raises(RegularError, match=re.escape(reason)):
        rust(source)
    with pytest.raises(GrammarError, match="grammar is not valid: "):
        write(Grammar("regex", source))


def test_patterns_of_schemas() -> None:
    schema = '{"type": "string", "pattern": "^a{,2}$"}'
    assert "^a{0,2}$" in write(Grammar("json_schema", schema))
