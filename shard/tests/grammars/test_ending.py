"""Endings from every state of a text, with few tokens left or after a token that requires many."""

import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from text_generation_shard.grammars.ending import EndingSearch, ends
from text_generation_shard.grammars.grammar import GrammarCompiler, load_tokenizer
from text_generation_shard.grammars.masks import Constraint
from tokenizers import Tokenizer

from integration_tests.schemas import check, closed
from shard.tests.driver import compile_now
from shard.tests.grammars.test_grammar import EMBEDDED, allowed, schema_text, walk


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(EMBEDDED, 4096, [2, 0])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


@pytest.fixture(scope="module")
def matching() -> LLTokenizer:
    return load_tokenizer(EMBEDDED / "tokenizer.json", 4096, (2, 0))


@pytest.mark.parametrize(
    ("source", "written", "longest"),
    [
        (r".*\.py", "", 3),
        (r".*\.py", "a.p", 1),
        (r".*\.py", "a.py", 0),
        (r"(a{1,9}){1,9}b", "a" * 81, 1),
        ("a{3,5}", "a", 2),
        ("[0-9]{3}-[0-9]{12}", "12", 14),
        (r"(\w+ ){3}\w+", "a b", 5),
        ("(?i)straße|x", "STRA", 2),
        ("[à-ü]{2}", "é", 1),
        ("日本[à-ü]?語", "日", 2),
        (r"(?s:.*)<answer>\d+</answer>", "x <answer>", 18),
        (r"([a-z]+ ){20}\.", "", 61),
        (r"(- [A-Z][a-z ]+\n){9}", "", 45),
        (r"([a-z]{1,9} ){30,90}", "", 60),
    ],
)
def test_an_ending_is_short(matching: LLTokenizer, source: str, written: str, longest: int) -> None:
    escaped = source.replace("/", r"\/")
    matcher = LLMatcher(matching, f"start: /{escaped}/")
    assert matcher.consume_tokens(matching.tokenize_str(written))
    found = EndingSearch(matching, f"start: /{escaped}/").find(matcher, 99, 5000)
    assert found is not None and ends(matcher, found, matching.eos_token)
    assert len(matching.decode_str(found)) <= longest


def test_an_ending_is_not_longer_than_its_limit(matching: LLTokenizer) -> None:
    source = 'start: "x" | "a" "0123456789"'
    matcher, search = LLMatcher(matching, source), EndingSearch(matching, source)
    assert matcher.consume_tokens(matching.tokenize_str("a"))
    assert search.find(matcher, 10, 300) is not None
    assert search.find(matcher, 1, 300) is None


def test_an_ending_of_another_state_is_tried(matching: LLTokenizer) -> None:
    source = "start: /[^z]*qqz/"
    matcher, search = LLMatcher(matching, source), EndingSearch(matching, "")
    known = matching.tokenize_str("qqz")
    assert search.find(matcher, 9, 30) is None
    assert search.find(matcher, 9, 300, [known]) == known


def test_special_tokens_are_tried(matching: LLTokenizer) -> None:
    source = "start: (/[a-z]/ | <[3]>)* <[1]>"
    matcher = LLMatcher(matching, source)
    assert EndingSearch(matching, source).find(matcher, 9, 300) == [1]


LARKS = {
    'start: "a" start | "b"': "a*b",
    'start: "(" start ")" | /[0-9]/': r"\(*[0-9]\)*",
    'start: e\ne: e /[+*]/ t | t\nt: /[0-9]+/ | "(" e ")"': r"[0-9+*()]+",
    'start: A B? C\nA: "x"{2,3}\nB: /b+/\nC: /c/ | "d"i': "x{2,3}b*[cdD]",
    'start: "a".."c" ~ 2..3': "[a-c]{2,3}",
    "start: PART\nPART: TEXT & ~/a.*/\nTEXT: /[ab]+/": "b[ab]*",
    'start: pair ("," pair)*\npair: NAME "=" /[0-9]+/\nNAME: /[a-z]+/ & ~"if"\n%ignore / /': (
        "( *(?!if=)[a-z]+ *= *[0-9]+ *,?)+"
    ),
    'start: until\nuntil[lazy]: /(?s:.*)/ "END"': "(?s:.*)END",
    'start: %json {"type": "integer", "minimum": 10}': "[0-9]{2,}",
    "start: /a/\n    | /b/ // one or the other\n": "a|b",
}


@pytest.mark.parametrize("source", LARKS)
def test_lark(source: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compile_now(compiler, source)
    assert not grammar.error
    draw = random.Random(3)
    for spare in (0, 1, 2, 8, 30):
        text = tokenizer.decode(walk(grammar, grammar.min_tokens + spare, draw))
        assert re.fullmatch(LARKS[source], text), text


def test_one_token_may_ask_for_many_more(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """A bracket is written only if its required content fits."""
    large = closed(**{f"a_long_name_{number}": {"type": "string"} for number in range(40)})
    schema = {"type": "array", "items": {"anyOf": [{"type": "integer"}, large]}}
    grammar = compile_now(compiler, schema_text(schema))
    opens = {token for token in range(4096) if "{" in tokenizer.decode([token])}
    for room in (40, 300, 700, 1200):
        constraint, written = Constraint(grammar, (), room, 0), list[int]()
        while len(written) < room and not constraint.failure:
            options = allowed(constraint)
            found = [token for token in options if token in opens] or options
            token = constraint.settle(found[0])
            if token in grammar.eos_ids:
                break
            written.append(token)
        assert not constraint.failure
        check(tokenizer.decode(written), schema)


@pytest.mark.parametrize("num_without", [3, 99])
def test_a_text_goes_on_to_where_an_ending_is_found(
    num_without: int,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = compile_now(compiler, r"start: /[a-z](\[[0-9]+\])?/")
    find, asked = EndingSearch.find, list[int]()

    def late(self: EndingSearch, *values: Any) -> list[int] | None:
        asked.append(1)
        return None if len(asked) <= num_without else find(self, *values)

    monkeypatch.setattr(EndingSearch, "find", late)
    [digit] = tokenizer.encode("0", add_special_tokens=False).ids
    constraint, written = Constraint(grammar, (), 900, 0), list[int]()
    for token in [*tokenizer.encode("a[", add_special_tokens=False).ids, *[digit] * 898]:
        written.append(constraint.settle(token))
        assert constraint.matcher is not None
        if constraint.failure or (constraint.matcher.is_accepting() and len(written) > 1):
            break
    if num_without == 3:
        assert re.fullmatch(r"a\[[0-9]+\]", tokenizer.decode(written))
    else:
        assert "can not be completed" in constraint.failure and len(written) < len(asked) * 99
