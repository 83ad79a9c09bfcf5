"""Schemas of tools that can not be compiled: what is left out of them, and what stays."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from text_generation_shard.grammars.grammar import GrammarCompiler
from text_generation_shard.grammars.schemas import lenient_text

from shard.tests.driver import compile_now
from shard.tests.grammars.test_grammar import EMBEDDED

TEXT = {"type": "string"}
OPEN: dict[str, Any] = {}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(EMBEDDED, 4096, [2, 0])


def tools(*schemas: Mapping[str, Any], is_lenient: bool = True) -> str:
    """A grammar of tools as the router writes it."""
    options = {"whitespace_pattern": "[ ]?", "lenient": is_lenient}
    rules = [
        f"call_{number}: %json {json.dumps({'type': 'object', **schema, 'x-guidance': options})}"
        for number, schema in enumerate(schemas)
    ]
    source = "\n".join([f"start: {' | '.join(rule[:6] for rule in rules)}", *rules])
    return json.dumps({"grammars": [{"lark_grammar": source}]}, separators=(",", ":"))


def schemas(text: str | None) -> list[dict[str, Any]]:
    """The schemas in such a grammar."""
    assert text is not None
    _, *rules = json.loads(text)["grammars"][0]["lark_grammar"].split("\n")
    return [json.loads(rule.partition("%json ")[2]) for rule in rules]


def left(compiler: GrammarCompiler, schema: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of a schema."""

    def compiles(part: Mapping[str, Any]) -> bool:
        lenient = {**part, "x-guidance": {"lenient": True}}
        return not compile_now(compiler, json.dumps({"grammars": [{"json_schema": lenient}]})).error

    (found,) = schemas(lenient_text(tools(schema), 2, compiles))
    assert found.pop("x-guidance")["lenient"] and found.pop("type") == "object"
    return found


def closed(part: Any, **more: Any) -> dict[str, Any]:
    return {"properties": {"a": part, "b": TEXT}, **more, "additionalProperties": False}


ZOD = r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"
LOOP = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}, "m": {"pattern": ZOD}}}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (closed(TEXT | {"pattern": ZOD, "format": "email"}), closed(TEXT | {"format": "email"})),
        (closed(TEXT, required=None), closed(TEXT)),
        (closed(TEXT, required=["b", "c"]), closed(TEXT)),
        (closed(TEXT | {"pattern": r"(a)\1"}), closed(TEXT)),
        (closed({"type": "date", "minLength": 2}), closed({"minLength": 2})),
        (closed({"type": ["string", "file"]}), closed(OPEN)),
        (
            closed({"type": "integer", "minimum": 0, "maximum": -1}, required=["a"]),
            closed({"type": "integer", "minimum": 0}, required=["a"]),
        ),
        (closed({"enum": []}, required=["a"]), closed(OPEN, required=["a"])),
        (closed({"$ref": "https://example.com/a"}), closed(OPEN)),
        (closed({"$ref": "#/$defs/no"}), closed(OPEN)),
        (closed({"items": None}), closed({"items": {}})),
        (closed({"anyOf": [TEXT, {"type": "any"}]}), closed({"anyOf": [TEXT, OPEN]})),
        (closed(None), closed(OPEN)),
        # Nothing that was left out may be forbidden.
        ({"properties": None, "additionalProperties": False}, {}),
        ({"patternProperties": {"(?!a)": TEXT, "b": TEXT}, "additionalProperties": False}, {}),
        (
            closed({"$ref": "#/$defs/n"}, **{"$defs": {"n": LOOP}}),
            closed(
                {"$ref": "#/$defs/n"},
                **{"$defs": {"n": {**LOOP, "properties": {**LOOP["properties"], "m": OPEN}}}},  # type: ignore[dict-item]
            ),
        ),
    ],
    ids=range(16),
)
def test_keywords_that_can_not_be_compiled_are_left_out(
    compiler: GrammarCompiler, schema: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert left(compiler, schema) == wanted


def test_each_tool_is_changed_alone_and_strict_ones_are_refused(compiler: GrammarCompiler) -> None:
    fine, bad = closed(TEXT, required=["b"]), closed(TEXT | {"pattern": ZOD}, required=["a"])
    grammar = compile_now(compiler, tools(bad, fine, bad))
    assert not grammar.error
    refused = compile_now(compiler, tools(fine, bad, is_lenient=False))
    assert refused.error.startswith("line 3: ") and "look-ahead" in refused.error


def test_an_answer_beside_tools_is_not_changed(compiler: GrammarCompiler) -> None:
    bad, options = {"required": None}, {"x-guidance": {"lenient": True}}
    call = {"properties": {"name": {"const": "f"}, "arguments": bad}, "required": ["name"]}
    for answer, is_refused in ((OPEN, False), (bad, True)):
        schema = {"anyOf": [{"type": "object", **answer}, {"type": "object", **call}], **options}
        source = f"start: formatted\nformatted: %json {json.dumps(schema)}"
        text = json.dumps({"grammars": [{"lark_grammar": source}]}, separators=(",", ":"))
        assert bool(compile_now(compiler, text).error) == is_refused


@pytest.mark.parametrize(
    "rule",
    [
        'call_0: "x" %json {"$ref": "#/$defs/a",\n"$defs": {"a": {"minimum": "b"}}}',
        'call_0: "x" %json {"$ref": "#/$defs/a", "x-guidance": "y"}',
        'formatted: %json {"minimum": "b", "x-guidance": {"lenient": true}}',
        'formatted: %json {"anyOf": [], "x-guidance": {"lenient": true}}',
        'formatted: %json {"anyOf": [{}, "b"], "x-guidance": {"lenient": true}}',
    ],
    ids=range(5),
)
def test_a_grammar_of_a_client_with_such_a_rule_is_refused(
    compiler: GrammarCompiler, rule: str
) -> None:
    source = f"start: {rule.partition(':')[0]}\n{rule}"
    text = json.dumps({"grammars": [{"lark_grammar": source}]}, separators=(",", ":"))
    assert compile_now(compiler, text).error
