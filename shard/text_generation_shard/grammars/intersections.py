"""Finds grammars whose cost llguidance's limits do not bound: where many patterns must hold at the
same place, and where a pattern repeats one text very often.

Runs where it may be killed: it can take long itself.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
