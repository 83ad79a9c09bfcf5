"""Merges two JSON schemas without combining keywords into one that requires both."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

TYPES = ["null", "boolean", "number", "string", "array", "object"]
NOTHING: Mapping[str, Any] = {"enum": []}
"""The schema without values."""
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
# Keywords that become lists.
_WRITTEN = {"pattern": "patterns", "format": "formats"}


def merged(one: Mapping[str, Any], two: Mapping[str, Any]) -> Mapping[str, Any]:
    """The intersection. Patterns and formats become the lists `patterns` and `formats`, a `const`
    an `enum`, `multipleOf` a Fraction."""
    if one is NOTHING or two is NOTHING:
        return NOTHING
    one, two = _plain(one), _plain(two)
    both = {**one, **two}
    for keyword in one.keys() & two.keys():
        both[keyword] = _keyword(keyword, one[keyword], two[keyword])
    if "properties" in both or "additionalProperties" in both:
        both["properties"] = _properties(one, two)
    if "prefixItems" in both:
        both["prefixItems"] = _prefix(one, two)
    if not both.get("type", TYPES):
        return NOTHING
    if "enum" in both and "type" in both:
        both["enum"] = [value for value in both["enum"] if _is_of(value, both["type"])]
    return both


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(schema)
    if isinstance(kind := plain.get("type"), str):
        plain["type"] = [kind]
    for keyword, listed in _WRITTEN.items():
        if keyword in plain:
            plain[listed] = [plain.pop(keyword)]
    if "const" in plain:
        constant = plain.pop("const")
        plain["enum"] = [value for value in plain.get("enum", [constant]) if value == constant]
    if "multipleOf" in plain and not isinstance(plain["multipleOf"], Fraction):
        plain["multipleOf"] = Fraction(str(plain["multipleOf"]))
    return plain


def _keyword(keyword: str, one: Any, two: Any) -> Any:
    if keyword in _LEAST:
        return max(one, two)
    if keyword in _MOST:
        return min(one, two)
    if keyword == "type":
        return _types(one, two)
    if keyword == "enum":
        return [value for value in one if value in two]
    if keyword in ("patterns", "formats"):
        return [*one, *(item for item in two if item not in one)]
    if keyword == "required":
        return list(dict.fromkeys([*one, *two]))
    if keyword == "multipleOf":
        numerator = math.lcm(one.numerator, two.numerator)
        return Fraction(numerator, math.gcd(one.denominator, two.denominator))
    if keyword in ("items", "additionalProperties"):
        return _all_of(one, two)
    if keyword == "patternProperties":
        return {**one, **{key: _all_of(one.get(key, True), part) for key, part in two.items()}}
    return two


def _types(one: list[str], two: list[str]) -> list[str]:
    found = [name for name in one if name in two or (name == "integer" and "number" in two)]
    return found + [
        name for name in two if name == "integer" and "number" in one and name not in found
    ]


def _all_of(one: Any, two: Any) -> Any:
    if one is True or one == two:
        return two
    return one if two is True else {"allOf": [one, two]}


def _properties(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    def of(schema: Mapping[str, Any], name: str) -> Any:
        if name in schema.get("properties", {}):
            return schema["properties"][name]
        # A pattern may match the name; patterns are not evaluated here.
        return True if schema.get("patternProperties") else schema.get("additionalProperties", True)

    names = dict.fromkeys([*one.get("properties", {}), *two.get("properties", {})])
    return {name: _all_of(of(one, name), of(two, name)) for name in names}


def _prefix(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[Any]:
    def of(schema: Mapping[str, Any], place: int) -> Any:
        items = schema.get("prefixItems", [])
        return items[place] if place < len(items) else schema.get("items", True)

    length = max(len(one.get("prefixItems", [])), len(two.get("prefixItems", [])))
    return [_all_of(of(one, place), of(two, place)) for place in range(length)]


def _is_of(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and value == int(value))
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)] in types
