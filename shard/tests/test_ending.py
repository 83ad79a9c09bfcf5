"""Endings from every state of a text, with few tokens left or after a token that requires many."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from text_generation_shard.grammars.blind import allowed_tokens
from text_generation_shard.grammars.compiler import GrammarCompiler
from text_generation_shard.grammars.constraint import Constraint
from text_generation_shard.grammars.ending import EndingSearch, Position
from text_generation_shard.grammars.language.formats import FORMATS
from text_generation_shard.grammars.language.grammar import grammar_expression
from text_generation_shard.grammars.language.places import after, distance, start
from text_generation_shard.grammars.language.regular import parse
from text_generation_shard.grammars.language.schema import schema_expression
from tokenizers import Tokenizer

from integration_tests.schemas import check, closed
from shard.tests.test_grammar import EMBEDDED, allowed, schema_text, walk


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(EMBEDDED, 4096, [2, 0])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


@pytest.mark.parametrize(
    ("source", "written", "rest"),
    [
        (r".*\.py", "", ".py"),
        (r".*\.py", "a.p", "y"),
        (r".*\.py", "a.py", ""),
        (r".*\.py", "a.pyx", ".py"),
        (r"(a{1,9}){1,9}b", "a" * 81, "b"),
        (r"(ab|abc)d", "abc", "d"),
        ("a{3,5}", "a", "aa"),
        ("(?i)straße|x", "STRA", "ßE"),
        (r"[[:lower:]&&[^a-y]]", "", "z"),
    ],
)
def test_the_rest_of_a_regular_expression_is_the_shortest(
    source: str, written: str, rest: str
) -> None:
    places = start(parse(source))
    for character in written:
        places = after(places, character)
    assert distance(places) == len(rest)
    nearest = min(places, key=lambda place: place.length)
    assert "".join(map(str, nearest.shortest())).lower() == rest.lower()


@pytest.mark.parametrize(
    ("schema", "written", "rest"),
    [
        ({"type": "integer", "minimum": 1000, "multipleOf": 7}, "", "1001"),
        ({"type": "integer", "minimum": 1000, "multipleOf": 7}, "2", "002"),
        ({"type": "integer", "maximum": -12}, "", "-12"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.01}, "", "0.001"),
        ({"type": "number", "minimum": 2, "maximum": 2.25}, "2.", "0"),
        ({"type": "string", "pattern": "^[a-m]+$", "minLength": 2}, '"b', 'a"'),
        ({"type": "string"}, '"\\', '""'),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, "[", "null,null]"),
        (closed(a={"type": "integer"}, b={"type": "string"}), '{"a":1', ',"b":""}'),
        ({"anyOf": [{"const": "abcdef"}, {"const": "ab"}]}, '"abc', 'def"'),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, "", '"ab"'),
    ],
)
def test_the_rest_of_a_schema_is_the_shortest(
    schema: dict[str, object], written: str, rest: str
) -> None:
    places = start(schema_expression(schema))
    for character in written:
        places = after(places, character)
    nearest = min(places, key=lambda place: place.length)
    assert "".join(map(str, nearest.shortest())) == rest


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
    grammar = compiler.compile_now(source)
    assert not grammar.error
    assert grammar.position is not None and grammar.position.places, "it was read"
    draw = random.Random(3)
    for spare in (0, 1, 2, 8, 30):
        text = tokenizer.decode(walk(grammar, grammar.min_tokens + spare, draw))
        assert re.fullmatch(LARKS[source], text), text


def test_what_is_not_read_is_searched(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(
        "text_generation_shard.grammars.ending.grammar_expression", lambda text, special: None
    )
    draw = random.Random(4)
    for schema in (closed(a={"type": "string"}, b={"type": "boolean"}), {"type": "array"}):
        grammar = compiler.compile_now(schema_text(schema))
        assert not grammar.error and grammar.position == Position(())
        for spare in (0, 3, 12):
            text = tokenizer.decode(walk(grammar, grammar.min_tokens + spare, draw))
            check(text, schema)
    endless = compiler.compile_now('start: "a" start')
    assert endless.error.startswith("no text was found that matches among")


def test_more_than_there_is_finds_the_text_that_is_there(compiler: GrammarCompiler) -> None:
    """Negations are ignored in the expression: the matcher refuses the shortest texts."""
    grammar = compiler.compile_now("start: TEXT\nTEXT: /[a-z]*/ & ~/([0-9a-x].*)?/")
    assert not grammar.error and grammar.min_tokens == 1


def test_one_token_may_ask_for_many_more(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """A bracket is written only if its required content fits."""
    large = closed(**{f"a_long_name_{number}": {"type": "string"} for number in range(40)})
    schema = {"type": "array", "items": {"anyOf": [{"type": "integer"}, large]}}
    grammar = compiler.compile_now(schema_text(schema))
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


def test_the_same_is_found_again(compiler: GrammarCompiler) -> None:
    text = schema_text(closed(a={"type": "string", "pattern": "a.*b.*c"}, b={}))
    first, second = (compiler.compile_now(text) for _ in range(2))
    assert first.ending == second.ending
    walks = [walk(grammar, grammar.min_tokens + 9, random.Random(7)) for grammar in (first, second)]
    assert walks[0] == walks[1]


def test_a_text_that_is_too_long_is_named(compiler: GrammarCompiler) -> None:
    many = {"type": "array", "items": {"type": "null"}, "minItems": 50_000}
    grammar = compiler.compile_now(schema_text(many))
    assert "250001 characters" in grammar.error


def test_what_can_not_be_read_is_no_expression(tmp_path: Path) -> None:
    for text in ("start: @other", "start: %unknown", json.dumps({"grammars": []}), "{"):
        assert grammar_expression(text, lambda name: None) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_ended_without_a_search(
    name: str, compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From wherever random tokens have led: the expression has no texts that the matcher refuses,
    and the matcher has none that the expression lacks."""
    monkeypatch.delattr(EndingSearch, "_search")
    grammar = compiler.compile_now(schema_text({"type": "string", "format": name}))
    assert grammar.start is not None and grammar.search is not None and grammar.position is not None
    characters = [n for n in range(4096) if len(tokenizer.decode([n])) == 1]
    for seed in range(20):
        draw, matcher, position = random.Random(seed), grammar.start.deep_copy(), grammar.position
        written = list[int]()
        while len(written) < 40 and not matcher.is_accepting():
            options = allowed_tokens(matcher.compute_bitmask())
            # Long tokens would leave out most states.
            some = [token for token in characters if token in options] if seed % 2 else options
            written.append(draw.choice(some or options))
            assert matcher.consume_token(written[-1])
            position = grammar.search.advance(position, written[-1:])
            if not matcher.is_accepting():
                rest = grammar.search.find(matcher, position, 400, 0)
                assert rest is not None
                value = json.loads(tokenizer.decode([*written, *rest]))
                assert re.fullmatch(FORMATS[name], value), value


@pytest.mark.parametrize("num_without", [3, 99])
def test_a_text_goes_on_to_where_an_ending_is_found(
    num_without: int,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = compiler.compile_now(r"start: /[a-z](\[[0-9]+\])?/")
    find, asked = EndingSearch.find, list[int]()

    def late(self: EndingSearch, *values: Any) -> list[int] | None:
        asked.append(1)
        return None if len(asked) <= num_without else find(self, *values)

    monkeypatch.setattr(EndingSearch, "find", late)
    [digit] = tokenizer.encode("0", add_special_tokens=False).ids
    constraint, written = Constraint(grammar, (), 200, 0), list[int]()
    for token in [*tokenizer.encode("a[", add_special_tokens=False).ids, *[digit] * 198]:
        written.append(constraint.settle(token))
        if constraint.failure or (constraint.matcher.is_accepting() and len(written) > 1):
            break
    if num_without == 3:
        assert re.fullmatch(r"a\[[0-9]+\]", tokenizer.decode(written))
    else:
        assert "can not be completed" in constraint.failure and len(written) < len(asked) * 20


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("^sc", {"type": "integer", "minimum": 50_000}),
        ("re$", {"type": "string", "minLength": 30}),
        ("o", {"pattern": "^[abc]{6}$"}),
    ],
)
def test_a_property_follows_the_patterns_that_match_its_name(
    pattern: str, part: dict[str, object], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    properties = {"score": {"type": part.get("type", "string")}, "a": {"type": "null"}}
    schema = closed(**properties) | {"patternProperties": {pattern: part}}
    grammar = compiler.compile_now(schema_text(schema))
    assert not grammar.error
    for spare in (0, 5, 40):
        text = tokenizer.decode(walk(grammar, grammar.min_tokens + spare, random.Random(spare)))
        check(text, schema)
