"""Grammars that are refused because no other limit bounds their cost."""

import json
import time
from typing import Any

import pytest
from text_generation_shard.grammars.schemas import excess

from shard.tests.grammars.test_grammar import schema_text


def patterns(number: int, form: str = "a{}") -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": form.format(n)} for n in range(number)]


def named(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"properties": {"b": part}} for part in parts]


def references(parts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    names = [f"d{number}" for number in range(len(parts))]
    together = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    return {"$defs": dict(zip(names, parts, strict=True)), **together, **more}


def chained(number: int) -> dict[str, Any]:
    """References to schemas that all hold at the end of a chain of them."""
    parts: list[dict[str, Any]] = [
        {"pattern": f"^a{n}", "properties": {"n": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(number)
    ]
    everything = references(parts)
    parts[-1]["properties"]["n"] = {"allOf": everything["allOf"]}
    return {**everything, "allOf": [{"$ref": "#/$defs/d0"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": patterns(26)},
        {"allOf": named(patterns(26))},
        {"type": "array", "items": {"allOf": [{"anyOf": [part, {}]} for part in patterns(26)]}},
        references(patterns(26)),
        references(named(patterns(26))),
        {**references(patterns(26)), "allOf": [{"$ref": f"#/$defs/d{n}"} for n in range(26)]},
        {"allOf": [{"prefixItems": [part]} for part in patterns(13)]},
        {"allOf": [{"items": part} for part in patterns(13)]},
        {"properties": {"b": {}}, "allOf": [{"patternProperties": {"b": p}} for p in patterns(13)]},
        chained(26),
        {"$ref": "x", "$defs": {"y": {"$id": "x", "allOf": patterns(26)}}},
        {"allOf": [{"pattern": "a", "format": "date", "minLength": 2}, *patterns(9)]},
    ],
    ids=range(12),
)
def test_many_patterns_that_hold_at_once_are_refused(schema: dict[str, Any]) -> None:
    for text, line in (
        (schema_text(schema), 0),
        (
            json.dumps(
                {"grammars": [{"lark_grammar": f"start: a\na: %json {json.dumps(schema)}"}]}
            ),
            2,
        ),
    ):
        found = excess(text)
        assert found is not None and found[0] == line
        assert "at most 10 patterns may hold at once" in found[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": patterns(8)},
        {"anyOf": patterns(40)},
        {"properties": {f"p{number}": part for number, part in enumerate(patterns(40))}},
        {"prefixItems": patterns(40)},
        {"allOf": [{"properties": {f"p{n}": part}} for n, part in enumerate(patterns(10))]},
        {"patternProperties": {f"^{part['pattern']}$": part for part in patterns(40)}},
        {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "anyOf": patterns(40)},
    ],
    ids=range(7),
)
def test_many_patterns_at_different_places_are_allowed(schema: dict[str, Any]) -> None:
    assert excess(schema_text(schema)) is None


def test_terminals_that_must_hold_at_once_are_counted() -> None:
    parts = " & ".join(f"/.*a{number}.*/" for number in range(12))
    assert "patterns may hold" in str(excess(f"start: A\nA: {parts}"))
    assert excess(f'start: A\nA: "{"&" * 40}" | /[a-z&&[^b]]+/ & ~"if" // {"&" * 40}') is None


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        ("a{1000000}", True),
        ("(x|ya{99999999999999999999999999})", True),
        ("(a{200}b){200}", True),
        ("((a{30}){30}){30}", True),
        ("(a{200}[)]b){200}", True),
        ("a{9000}b{9000}c{9000}", True),
        ("a{5000}", False),
        ("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" * 9, False),
        ("a{0,1000000}", False),
    ],
)
def test_a_part_may_not_be_repeated_too_often(pattern: str, is_refused: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"pattern": pattern}}}
    for text in (schema_text(schema), f"start: /{pattern}/"):
        assert (excess(text) is not None) == is_refused


def test_schemas_that_refer_to_others_twice_take_no_time() -> None:
    parts = {
        f"d{n}": {"allOf": [{"properties": {name: {"$ref": f"#/$defs/d{n + 1}"}}} for name in "ab"]}
        for n in range(60)
    }
    began = time.monotonic()
    assert excess(schema_text({"$ref": "#/$defs/d0", "$defs": {**parts, "d60": {}}})) is None
    assert time.monotonic() - began < 1
