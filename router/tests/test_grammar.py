"""Grammars on their way to the shards: what is written, what is refused, what is remembered."""

import asyncio
import json
import re
from typing import Any

import orjson
import pytest
from text_generation_router.errors import GrammarError, ValidationError
from text_generation_router.grammar import GrammarCompiler, checked_schema, rust, write
from text_generation_router.request import Grammar
from text_generation_router.scheduler.step import GrammarResult

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Compiling:
    """The part of the shards that a GrammarCompiler asks."""

    def __init__(self, error: str = "", delay_s: float = 0.0) -> None:
        self.answer = GrammarResult(error, 7)
        self.delay_s = delay_s
        self.asked: list[str] = []

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        self.asked.append(grammar)
        async with asyncio.timeout(min(timeout_s, 0.05)):
            await asyncio.sleep(self.delay_s)
        return self.answer


def compiler(shards: Compiling, is_enabled: bool = True) -> GrammarCompiler:
    return GrammarCompiler(shards, is_enabled)  # type: ignore[arg-type]


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def written(value: Any) -> dict[str, Any]:
    """What a schema becomes, without our options."""
    (grammar,) = json.loads(write(schema(value)))["grammars"]
    options = grammar["json_schema"].pop("x-guidance")
    assert options["whitespace_pattern"] == "[\\x20]?" and not options["lenient"]
    found: dict[str, Any] = grammar["json_schema"]
    return found


async def test_the_shards_are_asked_once() -> None:
    shards = Compiling()
    grammars = compiler(shards)
    first = await grammars.compile(schema(OBJECT))
    assert first == (shards.asked[0], 7)
    assert await grammars.compile(schema(OBJECT)) is first
    assert len(shards.asked) == 1
    for number in range(256):
        await grammars.compile(Grammar("regex", f"a{{{number}}}"))
    await grammars.compile(schema(OBJECT))
    assert len(shards.asked) == 258, "the oldest was forgotten"


async def test_a_grammar_that_the_shards_refuse_is_tgis_sentence_and_not_remembered() -> None:
    shards = Compiling("no such type")
    grammars = compiler(shards)
    for _ in range(2):
        with pytest.raises(
            ValidationError, match=r"^cannot compile regex from schema: no such type"
        ):
            await grammars.compile(schema(OBJECT))
    with pytest.raises(ValidationError, match=r"^grammar is not valid: no such type"):
        await grammars.compile(Grammar("regex", "a"))
    assert len(shards.asked) == 3


async def test_too_slow_is_the_users_error() -> None:
    with pytest.raises(ValidationError, match="could not be compiled within 10 s; make it smaller"):
        await compiler(Compiling(delay_s=60)).compile(schema(OBJECT))


@pytest.mark.parametrize(
    ("regex", "lark"),
    [
        ("[0-9]+", "start: /[0-9]+/"),
        ("a/b", "start: /a\\/b/"),
        ("a\\/b\\\\/", "start: /a\\/b\\\\\\//"),
        ("a\nb", "start: /a\\nb/"),
        ("a\\\nb\\\r", "start: /a\\nb\\r/"),
    ],
)
def test_a_regex_is_written_between_slashes(regex: str, lark: str) -> None:
    assert json.loads(write(Grammar("regex", regex))) == {"grammars": [{"lark_grammar": lark}]}


def test_lark_may_name_every_added_token() -> None:
    lark = r"""
        start: <a> b <b>  // <a>
        b: "<a> \" <a>" /<a>\/<a>/ <[7]> %json {"const": "<a>"}"""
    [written] = json.loads(write(Grammar("lark", lark), {"<a>": 5}))["grammars"]
    assert written == {"lark_grammar": lark.replace("start: <a>", "start: <[5]>")}


@pytest.mark.parametrize("part", ['"\\', "/\\", "<", '"<a', "\\"])
def test_names_in_a_hostile_grammar_are_found_in_linear_time(part: str) -> None:
    write(Grammar("lark", part * (60_000 // len(part))), {"<a>": 5})


def test_objects_have_the_properties_that_are_named() -> None:
    nested = {"type": "object", "properties": {"b": OBJECT}, "$defs": {"d": OBJECT}}
    closed = {**OBJECT, "additionalProperties": False}
    assert written(nested) == {
        "type": "object",
        "properties": {"b": closed},
        "$defs": {"d": closed},
        "additionalProperties": False,
    }
    # What says itself what else there may be, and what has no properties, stays as it is.
    for unchanged in ({**OBJECT, "additionalProperties": {"type": "null"}}, {"type": "object"}):
        assert written(unchanged) == unchanged


def test_a_schema_with_properties_is_an_object() -> None:
    """The first example of TGI's documentation has no type."""
    inner = {"properties": {"b": {"type": "null"}}, "required": ["b"]}
    found = written({"properties": {"a": inner}, "required": ["a"]})
    assert found["type"] == found["properties"]["a"]["type"] == "object"
    for other in ({"type": ["object", "null"]}, {"enum": [{}, 1]}, {"$ref": "#/$defs/x"}):
        told = written({"properties": {"a": {}}, "$defs": {"x": {}}, **other})
        assert told.get("type") == other.get("type")


@pytest.mark.parametrize(
    "combined",
    [
        {"allOf": [OBJECT, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]},
        {**OBJECT, "anyOf": [{"type": "object", "properties": {"b": {}}, "required": ["b"]}]},
        {
            **OBJECT,
            "$ref": "#/$defs/x",
            "$defs": {"x": {"type": "object", "properties": {"b": {}}}},
        },
        {**OBJECT, "patternProperties": {"^b": {}}},
    ],
)
def test_objects_that_others_add_to_stay_open(combined: dict[str, Any]) -> None:
    assert written(combined) == combined


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^score$", ["score"]),
        ("^(a|b-c)$", ["a", "b-c"]),
        (r"^(?:a[12]|b\.c)$", ["a1", "a2", "b.c"]),
        ("^a|b$", []),
        ("^[a-z]$", []),
        ("^a.$", []),
        ("a$", []),
        ("^[01][01][01][01][01][01][01]$", []),
    ],
)
def test_a_pattern_of_a_few_names_becomes_properties(pattern: str, names: list[str]) -> None:
    value = {"type": "object", "patternProperties": {pattern: {"minimum": 3}}}
    if not names:
        assert written(value) == value
        return
    assert written(value)["properties"] == {name: {"minimum": 3} for name in names}
    assert written(value)["additionalProperties"] is True, "as it was"
    both = written({**value, **OBJECT, "additionalProperties": False})
    if "a" in names:
        assert both["properties"]["a"] == {"allOf": [{"type": "integer"}, {"minimum": 3}]}
    assert "patternProperties" not in both and both["additionalProperties"] is False


def test_patterns_of_names_are_written_once() -> None:
    """A schema does not grow beyond its bound, nor become deeper, by its patterns."""
    nested: dict[str, Any] = {"minimum": 3}
    for _ in range(6):
        nested = {"type": "object", "patternProperties": {"^[ab][ab]$": nested}}
    found = written(nested)
    for _ in range(5):
        assert list(found["patternProperties"]) == ["^[ab][ab]$"]
        found = found["patternProperties"]["^[ab][ab]$"]
    assert list(found["properties"]) == ["aa", "ab", "ba", "bb"]
    shared = {f"^(a|x{number})$": {"maximum": number} for number in range(200)}
    flat = written({"type": "object", "patternProperties": shared})
    assert all(set(part) == {"maximum"} for part in flat["properties"]["a"]["allOf"])
    large = {"^[abcd][abcd][abcd]$": {"enum": ["e" * 2000]}}
    with pytest.raises(GrammarError, match="too large"):
        written({"type": "object", "patternProperties": large})


REFUSED = [
    ("{", "grammar is not valid: "),
    ("true", "a JSON schema must be an object"),
    ('{"foo": 1}', "grammar is not valid: Grammar must have a 'properties' field"),
    ('{"type": "array", "items": [{}]}', "`items` must be a schema; use `prefixItems`"),
    ('{"properties": {"a": {"exclusiveMinimum": true}}}', "`exclusiveMinimum` must be a number"),
    ('{"type": "object", "minProperties": 2}', "`minProperties` must be at most one more"),
    ('{"type": "object", "x-guidance": {"lenient": true}}', "`x-guidance` is not supported"),
    ('{"const": ' + "[" * 400 + "]" * 400 + "}", "grammar is too large: Recursion limit"),
    ('{"items": ' * 70 + "{}" + "}" * 70, "nested at most 64 deep"),
    ('{"const": "' + "x" * 65_530 + '"}', "at most 65536 bytes. Given: 65557"),
]


@pytest.mark.parametrize(("source", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_grammars_that_are_refused_without_asking_the_shards(source: str, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        write(Grammar("json_schema", source))
    assert sentence in str(caught.value)


def test_a_schema_is_measured_before_it_is_read_and_without_its_annotations() -> None:
    with pytest.raises(GrammarError, match=r"at most 1048576 bytes. Given: 1048577"):
        checked_schema("x" * ((1 << 20) + 1))
    told: dict[str, Any] = {"description": "d" * 70_000, "examples": [{"title": 1}], "title": "t"}
    properties = {"title": {"type": "null", **told}, "a": {"items": told, "default": "d" * 70_000}}
    assert written({**told, "properties": properties}) == {
        "type": "object",
        "properties": {"title": {"type": "null"}, "a": {"items": {}}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("keyword", "value", "is_kept"),
    [
        ("$id", "https://example.com/a", True),
        ("$id", "Tool Args", False),
        ("$id", None, False),
        ("id", "a b", False),
        ("$schema", "draft 7", False),
        ("$schema", "https://example.com/a", False),
        ("$schema", "http://json-schema.org/draft-07/schema#", True),
    ],
)
def test_an_identifier_that_is_no_uri_is_left_out(keyword: str, value: Any, is_kept: bool) -> None:
    item = {"type": "string", keyword: value}
    assert (keyword in written({**OBJECT, keyword: value})) == is_kept
    assert (keyword in written({"type": "array", "items": item})["items"]) == is_kept


def test_gbnf_is_written_in_lark() -> None:
    source = 'root ::= "a" (x | "b")\nx ::= [0-9]+'
    [grammar] = orjson.loads(write(Grammar("gbnf", source)))["grammars"]
    assert "start:" in grammar["lark_grammar"] and "[0-9]" in grammar["lark_grammar"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('x ::= "a"', "not GBNF: No 'root' rule"),
        ('root ::= "a', "not GBNF: Unexpected end"),
        ("root ::= " + "(" * 9999, "nest its rules less"),
        ("root ::= x\n" + 'x ::= "a"\n' * 256, "at most 256 rules and 16384 bytes; write it in"),
        ('root ::= "' + "a" * 20_000 + '"', "Given: 1 rules and 20011 bytes"),
    ],
)
def test_gbnf_is_refused(source: str, words: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(words)):
        write(Grammar("gbnf", source))


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
def test_grammars_that_are_the_same(source: str, written: str) -> None:
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
def test_grammars_that_would_be_read_as_something_else(source: str, reason: str) -> None:
    with pytest.raises(GrammarError, match="grammar is not valid: .*" + re.escape(reason)):
        write(Grammar("regex", source))


def test_patterns_of_schemas() -> None:
    schema = '{"type": "string", "pattern": "^a{,2}$"}'
    assert "^a{0,2}$" in write(Grammar("json_schema", schema))
