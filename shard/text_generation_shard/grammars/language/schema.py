"""JSON schemas as expressions, with llguidance's meaning: properties are written in order.

Schemas that must hold together are merged first. Unknown keywords are ignored: the expression then
has more texts than the schema.
"""

import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from text_generation_shard.grammars.language.expressions import (
    Characters,
    Choice,
    Expression,
    Reference,
    Repeat,
    Sequence_,
    Text,
    TooLargeError,
    one_of,
    settle,
)
from text_generation_shard.grammars.language.formats import FORMATS
from text_generation_shard.grammars.language.members import Members, Pairs
from text_generation_shard.grammars.language.merging import NOTHING, TYPES, merged
from text_generation_shard.grammars.language.numbers import Bounds, Number
from text_generation_shard.grammars.language.places import Both, after_text, distance, start
from text_generation_shard.grammars.language.regular import parse, parse_search
from text_generation_shard.grammars.language.strings import quoted, string

# Most combinations of alternatives when schemas with `anyOf` are merged.
_MOST_WAYS = 512
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_KEYWORDS = frozenset(
    {"type", "enum", "const", "pattern", "format", "minLength", "maxLength", "multipleOf"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
)
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"


def schema_expression(schema: Any) -> Expression:
    """The values of a schema as JSON. ValueError: the schema is invalid or unsupported."""
    builder = _Builder(schema)
    found = builder.expression(schema)
    builder.settle()
    return found


class _Builder:
    """Owns the expressions of one schema's parts."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references: dict[str, Reference] = {}
        self._any: Reference | None = None
        self._space = Repeat(Characters(r"[ \t\r\n]"))
        self._comma = self._spaced(Text(","))
        self._colon = self._spaced(Text(":"))
        self._character = Characters(".", "s")

    def settle(self) -> None:
        """Set the lengths of all references."""
        own = [self._any] if self._any is not None else []
        settle([*self._references.values(), *own])

    def expression(self, schema: Any) -> Expression:
        """The expression of a schema."""
        if schema is False:
            return Choice([])
        used = schema.keys() & (_KEYWORDS | _COMBINING) if isinstance(schema, Mapping) else set()
        if not used:
            return self._any_value()
        if used == {"$ref"}:
            return self._reference(schema["$ref"])
        for keyword in ("anyOf", "oneOf"):
            if used == {keyword}:
                return Choice([self.expression(part) for part in schema[keyword]])
        if used == {"allOf"} and len(schema["allOf"]) == 1:
            return self.expression(schema["allOf"][0])
        return Choice([self._value(flat) for flat in self._ways(schema, ())])

    def _spaced(self, expression: Expression) -> Expression:
        return Sequence_([self._space, expression, self._space])

    def _reference(self, name: str) -> Expression:
        if name not in self._references:
            reference = self._references[name] = Reference(name)
            reference.target = self.expression(self._resolved(name))
        return self._references[name]

    def _resolved(self, name: str) -> Any:
        if not isinstance(name, str) or not name.startswith("#"):
            return True
        part = self._root
        try:
            for key in name[1:].split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                part = part[int(key)] if isinstance(part, list) else part[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return True
        return part if name == "#" or name.startswith("#/") else True

    def _ways(self, schema: Any, names: tuple[str, ...]) -> list[Mapping[str, Any]]:
        """Alternative schemas without combining keywords."""
        if schema is False:
            return [NOTHING]
        if not isinstance(schema, Mapping):
            return [{}]
        ways = [merged({}, {key: schema[key] for key in schema if key in _KEYWORDS})]
        groups: list[list[Mapping[str, Any]]] = []
        if (name := schema.get("$ref")) is not None:
            if name in names:
                raise ValueError(f"{name} holds itself")
            groups.append(self._ways(self._resolved(name), (*names, name)))
        groups += [self._ways(part, names) for part in schema.get("allOf", ())]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = (self._ways(part, names) for part in schema[keyword])
                groups.append([way for part in parts for way in part])
        for group in groups:
            if len(ways) * len(group) > _MOST_WAYS:
                raise TooLargeError("`anyOf` within `allOf`")
            ways = [merged(own, way) for own in ways for way in group]
        return ways

    def _value(self, schema: Mapping[str, Any]) -> Expression:
        if schema is NOTHING:
            return Choice([])
        if "enum" in schema:
            return one_of([self._literal(value) for value in schema["enum"]])
        names = schema.get("type", TYPES)
        return Choice([self._of_type(name, schema) for name in names])

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> Expression:
        if name in ("number", "integer"):
            return _number(schema, is_integer=name == "integer")
        if name == "string":
            return self._string(schema)
        if name == "array":
            return self._array(schema)
        if name == "object":
            return self._object(schema)
        words = {"null": ["null"], "boolean": ["true", "false"]}
        return Choice([Text(word) for word in words[name]])

    def _any_value(self) -> Expression:
        if self._any is None:
            self._any = Reference("any")
            self._any.target = self._value({"type": TYPES})
        return self._any

    def _literal(self, value: Any) -> Expression:
        if isinstance(value, str):
            return _word(value)
        if isinstance(value, dict):
            items = [
                Sequence_([_word(key), self._colon, self._literal(item)])
                for key, item in value.items()
            ]
            return self._wrapped("{", self._listed(items), "}")
        if isinstance(value, list):
            return self._wrapped("[", self._listed(list(map(self._literal, value))), "]")
        return Text(json.dumps(value))

    def _listed(self, items: Sequence[Expression]) -> Expression:
        parts = [part for item in items for part in (self._comma, item)]
        return Sequence_(parts[1:])

    def _wrapped(self, before: str, inner: Expression, after: str) -> Expression:
        return Sequence_([Text(before), self._space, inner, self._space, Text(after)])

    def _string(self, schema: Mapping[str, Any]) -> Expression:
        parts = [parse_search(pattern) for pattern in schema.get("patterns", ())]
        parts += [parse(FORMATS[name]) for name in schema.get("formats", ()) if name in FORMATS]
        least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        if least or most < math.inf or not parts:
            parts.append(Repeat(self._character, int(least), most))
        if len(parts) == 1:
            return string(start(parts[0]))
        return string(start(Both([start(part) for part in parts])))

    def _array(self, schema: Mapping[str, Any]) -> Expression:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems", math.inf)
        prefix = [self.expression(item) for item in schema.get("prefixItems", ())]
        more = self.expression(schema.get("items", True))
        # What may follow after the first item, built from the last to the first.
        known = len(prefix)
        rest: Expression = Repeat(
            Sequence_([self._comma, more]), max(0, least - max(known, 1)), most - max(known, 1)
        )
        if most < max(known, 1):
            rest = Sequence_([])
        for place in range(min(known, int(min(most, known))) - 1, 0, -1):
            item = Sequence_([self._comma, prefix[place], rest])
            rest = item if place < least else Choice([Sequence_([]), item])
        items: Expression = Sequence_([prefix[0] if prefix else more, rest])
        if not most:
            items = Sequence_([])
        elif not least:
            items = Choice([Sequence_([]), items])
        return self._wrapped("[", items, "]")

    def _object(self, schema: Mapping[str, Any]) -> Expression:
        properties = dict(schema.get("properties", {}))
        required = list(schema.get("required", ()))
        patterns = schema.get("patternProperties", {})
        additional = schema.get("additionalProperties", True)
        for name in dict.fromkeys([*properties, *required]):
            parts = [part for pattern, part in patterns.items() if _matches(pattern, name)]
            if name in properties:
                parts.insert(0, properties[name])
            properties[name] = {"allOf": parts} if parts else additional
        pairs = [
            (name in required, self._pair(_name(name), part)) for name, part in properties.items()
        ]
        others = [
            self._pair(string(start(parse_search(pattern))), part)
            for pattern, part in patterns.items()
        ]
        others.append(self._pair(string(start(Repeat(self._character))), additional))
        other = Choice(others)
        least = max(0, int(schema.get("minProperties", 0)) - len(pairs))
        most = max(0, schema.get("maxProperties", math.inf) - len(required))
        first: Expression = Sequence_([])
        if most:
            rest = Repeat(Sequence_([self._comma, other]), max(0, least - 1), most - 1)
            some = Sequence_([other, rest])
            first = some if least else Choice([first, some])
        more = Repeat(Sequence_([self._comma, other]), least, most)
        members = Members(Pairs(pairs, self._comma, first, more))
        return self._wrapped("{", members, "}")

    def _pair(self, key: Expression, schema: Any) -> Expression:
        return Sequence_([key, self._colon, self.expression(schema)])


def _matches(pattern: str, name: str) -> bool:
    return not distance(after_text(start(parse_search(pattern)), name))


def _name(value: str) -> Expression:
    """The name of a property, in its only spelling."""
    return Text(json.dumps(value, ensure_ascii=False))


def _word(value: str) -> Expression:
    """One string; escaped characters have several spellings."""
    written = quoted(value)
    return Text(written) if written == f'"{value}"' else string(start(Text(value)))


def _number(schema: Mapping[str, Any], *, is_integer: bool) -> Expression:
    def bound(keyword: str) -> Fraction | None:
        value = schema.get(keyword)
        return Fraction(str(value)) if isinstance(value, int | float) else None

    low, high = bound("minimum"), bound("maximum")
    over, under = bound("exclusiveMinimum"), bound("exclusiveMaximum")
    low_is_open = over is not None and (low is None or over >= low)
    high_is_open = under is not None and (high is None or under <= high)
    low, high = over if low_is_open else low, under if high_is_open else high
    multiple = schema.get("multipleOf", Fraction(0))
    if low is None and high is None and not multiple:
        return parse(r"-?(0|[1-9][0-9]*)" if is_integer else _NUMBER)
    return Number(Bounds(is_integer, low, high, low_is_open, high_is_open, multiple))
