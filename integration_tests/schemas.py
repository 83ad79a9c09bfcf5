"""Two hundred JSON schemas for the tests of structured output, and the check of their answers."""

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

INTEGER: Schema = {"type": "integer"}
STRING: Schema = {"type": "string"}

LEAVES: tuple[Schema, ...] = (
    INTEGER,
    STRING,
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -17, "maximum": 123_456},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001},
    {"type": "integer", "multipleOf": 7, "minimum": 1000},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 4},
    {"type": "string", "minLength": 20, "maxLength": 24},
    {"type": "string", "pattern": "^[a-z]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(north|south)_[A-F0-9]{2,8}$"},
    {"type": "string", "pattern": "^[à-ü]{2,6}$"},
    {"type": "string", "pattern": "[0-9]{3}"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"enum": ["red", "green", "dark blue"]},
    {"enum": [None, True, 3, "x", {"a": [1, 2]}]},
    {"enum": ["été", "zwölf", "☃", "日本語", "\U0001f600", 'quote " and \\ slash\n']},
    {"const": "value/with?every#thing"},
    {"anyOf": [INTEGER, {"type": "string", "maxLength": 2}, {"type": "null"}]},
)


def closed(**properties: Any) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _wrapped(leaf: Schema) -> Iterator[Schema]:
    yield closed(value=leaf)
    yield {"type": "object", "properties": {"maybe": leaf, "id": INTEGER}, "required": ["id"]}
    yield {"type": "array", "items": leaf, "minItems": 1, "maxItems": 4}
    yield closed(outer=closed(inner=closed(leaf=leaf), also={"anyOf": [leaf, {"type": "null"}]}))
    yield {
        "$defs": {"leaf": leaf, "pair": closed(a={"$ref": "#/$defs/leaf"}, b=STRING)},
        "type": "object",
        "properties": {"pairs": {"type": "array", "items": {"$ref": "#/$defs/pair"}}},
        "required": ["pairs"],
    }
    yield {"type": "object", "additionalProperties": leaf}


def _special() -> Iterator[Schema]:
    node = closed(value=INTEGER, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
    yield {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    tree = closed(name=STRING, children={"type": "array", "items": {"$ref": "#/$defs/tree"}})
    yield {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}
    yield {}
    yield {"type": "object"}
    yield {"type": "array"}
    yield INTEGER
    yield closed(**{f"field_{number}": STRING for number in range(12)})
    yield {"type": "object", "properties": {f"option_{n}": INTEGER for n in range(8)}}
    yield closed(**{"ключ": {"enum": ["значение", "☃"]}, 'é"q': STRING, "空": INTEGER})
    yield {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [INTEGER], "items": STRING, "maxItems": 3}
    yield {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False}
    yield {"oneOf": [INTEGER, {"type": "array", "items": INTEGER}]}
    yield {"oneOf": [closed(kind={"const": "a"}, x=INTEGER), closed(kind={"const": "b"}, y=STRING)]}
    yield {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}},
            {"properties": {"b": STRING}, "required": ["b"]},
        ]
    }
    yield closed(list={"type": "array", "items": {"type": "boolean"}, "minItems": 12})
    square = {"type": "array", "minItems": 2, "maxItems": 3}
    yield {**square, "items": {**square, "items": {**square, "items": INTEGER}}}
    yield {
        "type": "array",
        "items": closed(big={"type": "array", "items": INTEGER, "minItems": 20}),
    }
    yield closed(a={"type": "string", "pattern": "^(a{50}|b)$"})
    yield closed(a={"type": "string", "minLength": 40})
    yield {"type": "object", "maxProperties": 2, "additionalProperties": INTEGER}
    yield {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}
    yield {"enum": [f"item number {number}" for number in range(60)]}
    deep: Schema = INTEGER
    for level in range(12):
        deep = closed(**{f"level_{level}": deep})
    yield deep
    yield closed(
        title=STRING,
        description={"type": "string", "maxLength": 30},
        tags={"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 5},
        price={"type": "number", "minimum": 0},
        stock={"anyOf": [INTEGER, {"type": "null"}]},
        address=closed(street=STRING, city=STRING, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    )
    yield {"type": "object", "title": "T", "description": "d", "default": {}, "examples": [{}]}


SCHEMAS: tuple[Schema, ...] = (*(w for leaf in LEAVES for w in _wrapped(leaf)), *_special())


def check(text: str, schema: Schema) -> None:
    """Asserts that a text is JSON and follows the schema."""
    error = next(Draft202012Validator(schema).iter_errors(json.loads(text)), None)
    assert error is None, f"{text!r} does not follow {schema}: {error and error.message}"
