"""Finds grammars whose cost llguidance's limits do not bound: where many patterns must hold at the
same place, and where a pattern repeats one text very often.

Runs where it may be killed: it can take long itself.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
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


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The number of patterns at a place of a value, and the places in it: by name, by index, and
    `*` for others."""

    num: int = 0
    inner: Mapping[str, "_Place"] = field(default_factory=dict)


_EMPTY = _Place()
# Where a schema refers to itself.
_AGAIN = _Place()


def _num_together(schema: Any) -> int:
    """The most patterns that must hold for the same string; all there are if that is not known."""
    places = _Places(schema)
    most = places.most(places.of(schema))
    if places.are_known:
        return most
    return len({pattern for part in _mappings(schema) for pattern in _patterns(part)})


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    """The patterns that a schema itself has for a string."""
    return [str(schema.get(keys[0])) for keys in _PATTERNS if schema.keys() & {*keys}]


class _Places:
    """Owns what is known of a schema's places. Schemas that refer to themselves are not followed
    again."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, _Place] = {}
        self._joined: dict[tuple[_Place, _Place, bool], _Place] = {}
        self._most: dict[_Place, int] = {}
        self.are_known = True
        """False: a schema's reference to itself must hold beside another, or references do not
        begin at the root."""

    def of(self, schema: Any) -> _Place:
        """The places of a schema's values."""
        if not isinstance(schema, Mapping):
            return _EMPTY
        if schema is not self._root and any(isinstance(schema.get(key), str) for key in _NAMES):
            self.are_known = False
        num, inner = len(_patterns(schema)), self._inner(schema)
        place = _Place(num, inner) if num or inner else _EMPTY
        parts = [self.of(part) for part in _listed(schema, "allOf")]
        either = partial(self._joint, is_both=False)
        for key in ("anyOf", "oneOf"):
            parts.append(reduce(either, map(self.of, _listed(schema, key)), _EMPTY))
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._referenced(reference))
        return reduce(partial(self._joint, is_both=True), parts, place)

    def _inner(self, schema: Mapping[str, Any]) -> dict[str, _Place]:
        named = {name: self.of(part) for name, part in _named(schema, "properties")}
        matched = [self.of(part) for _, part in _named(schema, "patternProperties")]
        either = partial(self._joint, is_both=False)
        if matched:
            others = reduce(either, matched)
            named = {
                name: self._joint(place, others, is_both=True) for name, place in named.items()
            }
        first = {str(at): self.of(part) for at, part in enumerate(_listed(schema, "prefixItems"))}
        rest = (self.of(schema.get(key)) for key in ("items", "additionalProperties"))
        inner = {**named, **first, "*": reduce(either, [*matched, *rest])}
        return {name: place for name, place in inner.items() if place is not _EMPTY}

    def _referenced(self, reference: str) -> _Place:
        if reference not in self._known:
            self._known[reference] = _AGAIN
            target = self._root if reference[:1] == "#" and "%" not in reference else None
            for name in reference.split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and name.isdecimal():
                    target = dict(enumerate(target)).get(int(name))
                else:
                    target = target.get(name) if isinstance(target, Mapping) else None
            self.are_known &= target is not None
            self._known[reference] = self.of(target)
        return self._known[reference]

    def _joint(self, one: _Place, other: _Place, is_both: bool) -> _Place:
        """The place where both hold, or one of them."""
        if one is _EMPTY or other is _EMPTY:
            return other if one is _EMPTY else one
        if is_both and _AGAIN in (one, other):
            self.are_known = False
        key = one, other, is_both
        if key not in self._joined:
            names = {**one.inner, **other.inner}
            inner = {name: self._joint(_at(one, name), _at(other, name), is_both) for name in names}
            num = one.num + other.num if is_both else max(one.num, other.num)
            self._joined[key] = _Place(num, inner)
        return self._joined[key]

    def most(self, place: _Place) -> int:
        """The most patterns at this place or at one in it."""
        if place not in self._most:
            self._most[place] = max([place.num, *map(self.most, place.inner.values())])
        return self._most[place]


def _at(place: _Place, name: str) -> _Place:
    return place.inner.get(name) or place.inner.get("*") or _EMPTY


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
