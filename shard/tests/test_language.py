"""Expressions of grammars that could be wrong, endless, slow, or too large for memory."""

import gc
import json
import random
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from text_generation_shard.grammars import ending
from text_generation_shard.grammars.compiler import GrammarCompiler
from text_generation_shard.grammars.constraint import Constraint, TokenizerFile
from text_generation_shard.grammars.language import expressions, places
from text_generation_shard.grammars.language.grammar import grammar_expression
from text_generation_shard.grammars.language.places import Place, Places, after, distance, start
from text_generation_shard.grammars.language.regular import parse
from text_generation_shard.grammars.language.schema import schema_expression

from shard.tests.test_grammar import EMBEDDED


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(EMBEDDED, 4096, [2, 0])


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return TokenizerFile(EMBEDDED / "tokenizer.json", 4096, (2, 0)).load()


def test_added_tokens_are_text_unless_they_are_special_or_end_it(tmp_path: Path) -> None:
    file = json.loads((EMBEDDED / "tokenizer.json").read_text())
    for token, is_special in ((4096, False), (4097, True), (4098, False)):
        added = {"id": token, "content": f"<{token}>", "special": is_special, "normalized": False}
        more = {"single_word": False, "lstrip": False, "rstrip": False}
        file["added_tokens"].append(added | more)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    tokenizer = TokenizerFile(path, 4100, (2, 4098)).load()
    special = [token for token in range(4095, 4100) if tokenizer.is_special_token(token)]
    assert special == [4097, 4098, 4099]
    assert tokenizer.eos_tokens == [2, 4098]
    assert tokenizer.tokenize_str("a<4096>") == [*tokenizer.tokenize_str("a"), 4096]
    # The grammar leaves one way, which is the tokenizer's own.
    forced = LLMatcher(tokenizer, lark('start: "<4096>" "b"'))
    assert forced.compute_logit_bias()[4096]


def lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def read(begin: Places, text: str) -> Places:
    for character in text:
        begin = after(begin, character)
    return begin


def shortest(of: Places) -> str:
    return "".join(map(str, min(of, key=lambda place: place.length).shortest()))


def test_a_grammar_inside_another_has_its_own_names(
    compiler: GrammarCompiler, tokenizer: LLTokenizer
) -> None:
    inner = '%lark {\nstart: X{2} "}" %json {"const": "{"}\nX: "z"\n}'
    rules = f'start: X b X\nb: {inner}\nX: "x"'
    expression = grammar_expression(lark(rules), lambda name: None)
    assert expression is not None
    assert shortest(start(expression)) == 'xzz}"{"x'
    assert compiler.compile_now(lark(rules)).ending == (*tokenizer.tokenize_str('xzz}"{"x'),)
    assert grammar_expression(lark("start: %lark {\nstart: X"), lambda name: None) is None


@pytest.mark.parametrize(
    ("rules", "written", "rest"),
    [
        ('start: a\na: b\nb: a | "x"', "", "x"),
        ('start: "p" | "b" c "d"\nc: e | "zz"\ne: c | "yy"', "b", "zzd"),
        ('start: a "."\na: b | "x"\nb: c "y"? | a\nc: a | b', "", "x."),
    ],
)
def test_rules_that_are_each_other_have_a_shortest_text(
    compiler: GrammarCompiler, tokenizer: LLTokenizer, rules: str, written: str, rest: str
) -> None:
    expression = grammar_expression(lark(rules), lambda name: None)
    assert expression is not None
    found = shortest(read(start(expression), written))
    # Several are as short.
    assert len(found) == len(rest)
    # The text is ended by force.
    grammar = compiler.compile_now(lark(rules))
    constraint = Constraint(grammar, [], len(written + rest), 0)
    for token in tokenizer.tokenize_str(written):
        assert constraint.settle(token) == token
    assert distance(constraint._position.places) == len(rest)
    end = constraint._search.find(constraint.matcher, constraint._position, 10, 100)
    assert end is not None
    assert len(tokenizer.decode_str(end)) == len(rest)


def test_a_text_of_any_length_is_not_written_where_a_shorter_one_does_not_fit(
    tokenizer: LLTokenizer,
) -> None:
    doubled = "\n".join(f"r{number}: r{number + 1} r{number + 1}" for number in range(50))
    text = lark(f'start: "x" | "a" "0123456789" | "a" r0\n{doubled}\nr50: "y"')
    search = ending.EndingSearch(tokenizer)
    begin = search.begin(text)
    assert begin is not None
    matcher, [token] = LLMatcher(tokenizer, text), tokenizer.tokenize_str("a")
    assert matcher.consume_token(token)
    position = search.advance(begin, [token])
    assert [place.length for place in position.places] == [10, 2**50]
    assert search.find(matcher, position, 10, 1000) is not None
    assert search.find(matcher, position, 1, 1000) is None


def chained(first: str, rule: str, last: str) -> str:
    rules = "\n".join(f"r{at}: {rule.format(f'r{at + 1}')}" for at in range(60))
    return lark(f"start: {first}\n{rules}\nr60: {last}")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (chained('"x" | "a" (r0 | "q") "."', '{0} | {0} "z"', '"y"'), "ayzz"),
        (chained('"x" | "a" (r0 | "q") "."', '{0} | {0} "z"', '"y"'), "aq"),
        (chained('"x" | "a" r0 "y"', "{0} {0}", '"" | "b"'), "abb"),
        (
            chained('"x" | "a" R0', "{0} | {0}", '"y"').replace("\\nr", "\\nR").replace(" r", " R"),
            "ay",
        ),
    ],
)
def test_rules_with_more_ways_than_can_be_followed_take_no_time(
    compiler: GrammarCompiler, tokenizer: LLTokenizer, text: str, written: str
) -> None:
    constraint = Constraint(compiler.compile_now(text), [], 10, 0)
    for character in written:
        for token in tokenizer.greedy_tokenize(character):
            assert constraint.settle(token) == token
    assert not constraint.failure
    end = constraint._search.find(constraint.matcher, constraint._position, 10, 500)
    if end:
        assert ending.ends(constraint.matcher, end, tokenizer.eos_token)


def test_what_is_nested_too_deep_for_the_stack_is_followed_without_its_expression(
    monkeypatch: pytest.MonkeyPatch, tokenizer: LLTokenizer
) -> None:
    search = ending.EndingSearch(tokenizer)
    text = lark('start: "a" "b" "c"')
    matcher, position = LLMatcher(tokenizer, text), search.begin(text)
    assert position is not None

    def too_deep(*arguments: object) -> Places:
        raise RecursionError

    monkeypatch.setattr(Place, "shortest", too_deep)
    found = search.find(matcher, position, 10, 1000)
    assert found is not None
    assert tokenizer.decode_str(found) == "abc"
    monkeypatch.setattr(ending, "after_text", too_deep)
    assert search.advance(position, tokenizer.tokenize_str("a")).places == ()
    monkeypatch.setattr(ending, "start", too_deep)
    assert search.begin(text) == ending.Position(())


@pytest.mark.slow
def test_what_places_remember_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_MOST_REMEMBERED", 200)
    monkeypatch.setattr(expressions, "_MOST_KNOWN", 200)
    begin = start(schema_expression({"type": "array", "items": {"type": "integer", "minimum": 7}}))
    gc.collect()
    before = sum(type(item) is Place for item in gc.get_objects())
    numbers = random.Random(1)
    for _ in range(2000):
        written = f"[{numbers.randrange(1000, 10**9)},{numbers.randrange(1000, 10**9)}"
        found = read(begin, written)
        assert shortest(found) == "]"
        assert len(found) == 1
    gc.collect()
    assert sum(type(item) is Place for item in gc.get_objects()) - before < 1000


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        ("[[:^alpha:]]", "é1-", "aZ"),
        ("[[:alpha:]]", "aZ", "é1"),
        ("[^[:^alpha:]]", "aZ", "é1"),
        ("[[:word:]&&[:^digit:]]", "a_", "1é"),
        ("[[:punct:]]", "]`[!~-", "a1é"),
        ("[a||b]", "|ab", "c"),
        ("[||]", "|", "a"),
        (r"[\[:alpha:]", "[:alph", "z"),
    ],
)
def test_classes_are_those_of_rust(
    tokenizer: LLTokenizer, source: str, inside: str, outside: str
) -> None:
    begin = start(parse(source))
    text = lark(f"start: /{source}/")
    for character in inside + outside:
        tokens = tokenizer.greedy_tokenize(character)
        is_in = ending.ends(LLMatcher(tokenizer, text), tokens, tokenizer.eos_token)
        assert is_in == (character in inside)
        assert bool(after(begin, character)) == is_in


def test_many_texts_are_one_place() -> None:
    values = [f"value {number}" for number in range(500)] + ["value", "other", 'a"b', ""]
    begin = start(schema_expression({"enum": values}))
    assert shortest(begin) == '""'
    for written, rest in [
        ('"val', 'ue"'),
        ('"value', '"'),
        ('"value 4', '"'),
        ('"o', 'ther"'),
        ('"a', '\\"b"'),
    ]:
        found = read(begin, written)
        assert shortest(found) == rest
        assert len(found) == 1
    assert read(begin, '"value 50"') and not read(begin, '"value 500')


def test_numbers_without_an_end_are_not_read() -> None:
    schema = '{"enum": [1e999], "type": "integer"}'
    text = f'{{"grammars": [{{"json_schema": {schema}}}]}}'
    assert grammar_expression(text, lambda name: None) is None


def test_an_intersection_is_searched_less_behind_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = {"allOf": [{"pattern": "^[ab]*a[ab]{8}$"}, {"pattern": "^[ab]*b[ab]{5}c?$"}]}
    written = '"abbab'
    right = distance(read(start(schema_expression({"type": "string", **schema})), written))
    monkeypatch.setattr(places, "_MOST_STATES_BEHIND", 2)
    found = read(start(schema_expression({"type": "string", **schema})), written)
    # What is not found out is taken to be as near as it can be.
    assert 2 < distance(found) < right
    assert read(found, 'abbbbbbbb"')


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({"type": "string"}, ["abc", "é€", '"', "x"]),
        ({"type": "string", "minLength": 4, "maxLength": 9}, ["ab", "cdefg", '"', "hij", "\\n"]),
        ({"type": "string", "pattern": "^[a-c]{3,8}$"}, ["ab", "ca", "abcd", "d", '"']),
        ({"type": "string", "pattern": "^[a-c]*cb[a-z]{2,}$"}, ["abcb", "cb", "zz", '"', "a"]),
        ({"type": "array", "items": {"type": "string", "maxLength": 3}}, ["abc", '"', ", ", "]"]),
        ({"type": "integer", "minimum": 10}, ["10", "2345", "0"]),
    ],
)
def test_a_text_read_at_once_leads_where_its_characters_lead(
    schema: dict[str, object], parts: list[str]
) -> None:
    numbers = random.Random(3)
    begin = start(schema_expression(schema))
    for _ in range(300):
        slowly = quickly = begin
        for text in ['["' if schema["type"] == "array" else '"', *numbers.choices(parts, k=6)]:
            slowly, quickly = read(slowly, text), places.after_text(quickly, text)
            assert set(slowly) == set(quickly), text
