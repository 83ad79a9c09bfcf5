"""Grammars before they are compiled: those that must not be, and what is left out of others.

Refused are grammars whose cost llguidance's limits do not bound: where many patterns must hold at
the same place, and where a pattern repeats one text very often. Of the schemas of tools that are
not strict, what can not be compiled is left out.

Runs where it may be killed: it can take long itself.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

# The time of a single token doubles with each pattern: 10 ms at 12, 6 s at 20, 116 s at 24.
_MOST_TOGETHER = 10
# A character repeated 30,000 times takes 0.2 s and 11 MB before the limits apply; 1,000,000 times,
# 1.5 s and 100 MB.
_MOST_REPEATS = 20_000
_TOGETHER = (
    f"it is too complex: at most {_MOST_TOGETHER} patterns may hold at once; make it smaller"
)
_REPEATED = (
    f"it is too large: its parts are repeated more than {_MOST_REPEATS} times; make it smaller"
)
# Keywords that become one pattern of a string.
_PATTERNS = (("pattern",), ("format",), ("minLength", "maxLength"))
# Keywords that name a schema, so that references begin there.
_NAMES = ("$id", "id", "$anchor")
# The bounds of a group, and how often a part is at least repeated.
_PIECE = re.compile(r"\\.|(?P<open>\()|(?P<close>\))|[{~]\s*(?P<least>\d+)|[^\\(){~]+|.", re.S)
_SCHEMA = re.compile(r"%json\s*(?=[{\[])")
# Of a Lark grammar: strings, regular expressions and comments.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*')


def excess(text: str) -> tuple[int, str] | None:
    """Why a grammar in llguidance's form must not be compiled, and in which line of its Lark, if
    that is known; None: it may be."""
    try:
        [grammar] = json.loads(text)["grammars"]
    except (ValueError, LookupError, TypeError):
        grammar = {"lark_grammar": text}
    lark = str(grammar.get("lark_grammar", ""))
    schemas, between = _schemas_in(lark)
    for line, schema in (*schemas, (0, grammar.get("json_schema"))):
        if _num_together(schema) > _MOST_TOGETHER:
            return line, _TOGETHER
        for part in _mappings(schema):
            strings = (string for string in (*part, *part.values()) if isinstance(string, str))
            if any(_num_repeats(string) > _MOST_REPEATS for string in strings):
                return line, _REPEATED
    if _QUOTED.sub("", between).count("&") >= _MOST_TOGETHER:
        return 0, _TOGETHER
    return (0, _REPEATED) if _num_repeats(between) > _MOST_REPEATS else None


def _schemas_in(lark: str) -> tuple[list[tuple[int, Any]], str]:
    """The schemas in a Lark grammar with their lines, and what is between them."""
    schemas, between, end = list[tuple[int, Any]](), "", 0
    for found in _SCHEMA.finditer(lark):
        if found.end() < end:
            continue  # in a string of the schema before
        with suppress(ValueError):
            schema, after = json.JSONDecoder().raw_decode(lark, found.end())
            schemas.append((lark.count("\n", 0, found.end()) + 1, schema))
            between += lark[end : found.start()]
            end = after
    return schemas, between + lark[end:]


def _num_repeats(pattern: str) -> int:
    """The characters that repetitions require; those of nested ones are multiplied."""
    totals, last = [0], 1
    for piece in _PIECE.finditer(pattern):
        if piece["open"]:
            totals.append(0)
        elif piece["close"]:
            last = max(1, totals.pop() if len(totals) > 1 else totals[0])
            totals[-1] += last if last > 1 else 0
        elif piece["least"]:
            # The first digits of a longer number are large enough.
            more = last * int(piece["least"][:9])
            totals[-1] += more - (last if last > 1 else 0)
            last = more
        else:
            last = 1
    return sum(totals)


_Depths = tuple[int, ...]
"""By depth in a value: the most patterns that may have to hold for the same string there."""
_LOOP: _Depths = (0,)
"""Where a schema refers to itself, which is not followed again."""


def _num_together(schema: Any) -> int:
    """No fewer than the most patterns that must hold for the same string."""
    counter = _Counter(schema)
    most = max(counter.of(schema), default=0)
    if counter.is_known and not (counter.has_loops and counter.has_sums):
        return most
    return len({pattern for part in _mappings(schema) for pattern in _patterns(part)})


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    """The patterns that a schema itself has for a string."""
    return [str(schema.get(keys[0])) for keys in _PATTERNS if schema.keys() & {*keys}]


class _Counter:
    """Counts the patterns of a schema's values. Names are not compared: the parts of an `allOf` may
    have their patterns at different names, and count as if they were at the same."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, _Depths] = {}
        self.is_known, self.has_loops, self.has_sums = True, False, False
        """Whether all references begin at the root, a schema refers to itself, and several schemas
        must hold at once."""

    def of(self, schema: Any) -> _Depths:
        """The patterns of a schema's values; empty where it has none."""
        if not isinstance(schema, Mapping):
            return ()
        if schema is not self._root and any(isinstance(schema.get(key), str) for key in _NAMES):
            self.is_known = False
        named = self._most(part for _, part in _named(schema, "properties"))
        matched = self._most(part for _, part in _named(schema, "patternProperties"))
        others = (schema.get("items"), schema.get("additionalProperties"))
        rest = self._most([*_listed(schema, "prefixItems"), *others])
        inner = _largest([self._sum([named, matched]), rest])
        num = len(_patterns(schema))
        parts = [(num, *inner) if num or inner else ()]
        parts += map(self.of, _listed(schema, "allOf"))
        parts += [self._most(_listed(schema, key)) for key in ("anyOf", "oneOf")]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._referenced(reference))
        return self._sum(parts)

    def _referenced(self, reference: str) -> _Depths:
        if reference not in self._known:
            self._known[reference] = _LOOP
            target = self._root if reference[:1] == "#" and "%" not in reference else None
            for name in reference.split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and name.isdecimal():
                    target = dict(enumerate(target)).get(int(name))
                else:
                    target = target.get(name) if isinstance(target, Mapping) else None
            self.is_known &= target is not None
            self._known[reference] = self.of(target)
        self.has_loops |= self._known[reference] is _LOOP
        return self._known[reference]

    def _most(self, schemas: Iterable[Any]) -> _Depths:
        """The patterns where one of these schemas holds."""
        return _largest([self.of(schema) for schema in schemas])

    def _sum(self, parts: Sequence[_Depths]) -> _Depths:
        """The patterns where all of these hold."""
        self.has_sums |= sum(map(bool, parts)) > 1
        return tuple(map(sum, zip_longest(*parts, fillvalue=0)))


def _largest(parts: Sequence[_Depths]) -> _Depths:
    return tuple(map(max, zip_longest(*parts, fillvalue=0)))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings in a value."""
    if isinstance(value, Mapping):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value
    for part in inner if isinstance(value, Mapping | list) else ():
        yield from _mappings(part)


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _named(schema: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = schema.get(key)
    return list(value.items()) if isinstance(value, Mapping) else []


# ---- Tools that are not strict ----

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
