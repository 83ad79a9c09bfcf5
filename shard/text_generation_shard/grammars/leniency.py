"""Schemas of tools that are not strict: what can not be compiled of them is left out."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Compiles = Callable[[Mapping[str, Any]], bool]
# Keywords whose values hold schemas: by name, in a list, or one.
_DEFINITIONS = ("$defs", "definitions")
_NAMED = (*_DEFINITIONS, "properties", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
# Keywords that are tried behind the others, in this order.
_LAST = ("additionalProperties", "required")
# The rules of the router's grammars of tools: the arguments of one tool; an answer or a call.
_RULE = re.compile(r"((?:call_\d+|formatted): .*?%json )(\{.*)")


def _rule(line: str) -> tuple[str, dict[str, Any], str] | None:
    """A rule of the router's as the text before its schema, the schema, and the text behind it.
    None: it is another's. A client's own grammar may have rules of these names."""
    found = _RULE.match(line)
    if found is None:
        return None
    try:
        schema, end = json.JSONDecoder().raw_decode(found[2])
    except (ValueError, RecursionError):
        return None
    options, parts = schema.get("x-guidance"), schema.get("anyOf")
    if not isinstance(options, dict):
        return None
    is_choice = isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)
    if options.get("lenient") and line.startswith("formatted") and not is_choice:
        return None
    return found[1], schema, found[2][end:]


def _lines(text: str) -> list[str]:
    """The lines of a grammar in Lark that the router has written."""
    if not text.startswith('{"grammars":[{"lark_grammar":'):
        return []
    source: str = json.loads(text)["grammars"][0]["lark_grammar"]
    return source.split("\n")


def lenient_text(text: str, line: int, compiles: Compiles) -> str | None:
    """The grammar without what can not be compiled in this line and in all others that may be
    changed; None: this line may not be changed, or needs no change. `compiles` tells whether a
    schema can be compiled by itself."""
    lines = _lines(text)
    changed = [_lenient(one, compiles) for one in lines] if 0 < line <= len(lines) else lines
    if changed is lines or changed[line - 1] == lines[line - 1]:
        return None
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(changed)}]}, separators=(",", ":"))


def _lenient(line: str, compiles: Compiles) -> str:
    rule = _rule(line)
    if rule is None or not rule[1]["x-guidance"].get("lenient") or compiles(rule[1]):
        return line
    before, schema, behind = rule
    if before.startswith("formatted"):
        answer, *calls = schema["anyOf"]
        changed = {**schema, "anyOf": [answer, *(_Leaver(compiles).whole(call) for call in calls)]}
    else:
        changed = _Leaver(compiles).whole(schema) | {"type": "object"}
        changed["x-guidance"] = schema["x-guidance"]
    return line if changed == schema else before + json.dumps(changed) + behind


class _Leaver:
    """Owns the definitions of one schema, to which its parts refer."""

    def __init__(self, compiles: Compiles) -> None:
        self._compiles_alone = compiles
        self._definitions: dict[str, Any] = {}

    def _compiles(self, part: Mapping[str, Any]) -> bool:
        return self._compiles_alone({**self._definitions, **part})

    def whole(self, schema: Mapping[str, Any]) -> Any:
        """The schema without what can not be compiled of it."""
        own = {key: schema[key] for key in _DEFINITIONS if isinstance(schema.get(key), dict)}
        # While definitions are changed, others that they refer to may be anything.
        self._definitions = {key: dict.fromkeys(value, True) for key, value in own.items()}
        self._definitions = {key: self._inside(key, value) for key, value in own.items()}
        return self.of({**schema, **self._definitions})

    def of(self, part: Any) -> Any:
        """The part without what can not be compiled of it."""
        if not isinstance(part, dict):
            return part if isinstance(part, bool) else {}
        if self._compiles(part):
            return part
        inner = {key: self._inside(key, value) for key, value in part.items()}
        return inner if self._compiles(inner) else self._joined(inner)

    def _inside(self, key: str, value: Any) -> Any:
        if key in _NAMED and isinstance(value, dict):
            return {name: self.of(part) for name, part in value.items()}
        if key in _LISTED and isinstance(value, list):
            return [self.of(part) for part in value]
        return self.of(value) if key in _SINGLE else value

    def _joined(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that can be compiled together."""
        kept: dict[str, Any] = {}
        for key in sorted(inner, key=lambda key: key in _LAST and 1 + _LAST.index(key)):
            # It would forbid what was left out.
            is_closing = key == "additionalProperties" and inner.keys() & {*_NAMED} - kept.keys()
            if not is_closing and self._compiles({**kept, key: inner[key]}):
                kept[key] = inner[key]
        return kept
