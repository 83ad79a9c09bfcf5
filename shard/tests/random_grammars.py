"""Strategies for realistic regular expressions and JSON schemas that have texts."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_LITERALS = st.sampled_from("abcxyz019éß☃日\U0001f600 ")
_ESCAPES = st.sampled_from([r"\.", r"\-", r"\+", r"\(", r"\)", r"\[", r"\\", r"\*", r"\?", r"\/"])
_PORTABLE = [".", "[a-z]", "[A-Z0-9_]", "[^abc]", "[à-ü]", "[a-c.-]", "[ab]", r"[\]x]", "[^\\s]"]
_CLASSES = [r"\d", r"\w", r"\s", r"\S", r"\W", r"\p{L}", r"\p{Greek}", r"[^\d\s]", r"[\w.]"]
_COUNTS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "??", "{1,2}?"]


def _expressions(atoms: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        joined = st.lists(inner, min_size=1, max_size=4).map("".join)
        groups = st.lists(joined, min_size=1, max_size=3).map("|".join).map("(?:{})".format)
        counted = st.tuples(groups | atoms, st.sampled_from(_COUNTS)).map("".join)
        return joined | groups | counted

    return st.recursive(atoms, grown, max_leaves=12)


regular_expressions = _expressions(_LITERALS | _ESCAPES | st.sampled_from(_PORTABLE + _CLASSES))
_inner = _expressions(_LITERALS | st.sampled_from(_PORTABLE))
patterns = st.tuples(st.sampled_from(["^(?:{})$", "{}", "^(?:{})", "(?:{})$"]), _inner).map(
    lambda pair: pair[0].format(pair[1])
)
_FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"]
_names = st.text('abcdé "\\/_☃', min_size=1, max_size=4)


def _between(least: str, most: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    """Both bounds, one or none, in order."""
    pairs = st.lists(values, min_size=2, max_size=2).map(sorted)
    kinds = st.sampled_from([(), (least,), (most,), (least, most)])
    return st.tuples(pairs, kinds).map(
        lambda found: {
            key: value
            for key, value in zip((least, most), found[0], strict=True)
            if key in found[1]
        }
    )


def _typed(kind: str, more: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return more.map(lambda found: {"type": kind, **found})


_integers = _between("minimum", "maximum", st.integers(-1200, 1200))
_numbers = _between("minimum", "maximum", st.integers(-400, 400).map(lambda n: n / 8))
_LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "number")]),
    _typed("integer", _integers),
    _typed("integer", st.integers(2, 30).map(lambda n: {"multipleOf": n, "minimum": 7})),
    _typed("number", _numbers),
    _typed("string", _between("minLength", "maxLength", st.integers(0, 9))),
    _typed("string", patterns.map(lambda pattern: {"pattern": pattern})),
    _typed("string", st.sampled_from(_FORMATS).map(lambda name: {"format": name})),
    st.lists(st.none() | st.booleans() | st.integers(-99, 99) | _names, min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    _names.map(lambda name: {"const": name}),
    st.just({"type": ["string", "null"]}),
    st.just({"$ref": "#/$defs/tree"}),
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    @st.composite
    def draw_object(draw: st.DrawFn) -> Schema:
        properties = draw(st.dictionaries(_names, inner, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        if draw(st.booleans()):
            schema["additionalProperties"] = draw(st.just(False) | inner)
        return schema

    return draw_object()


def _grown(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    counts = _between("minItems", "maxItems", st.integers(0, 3))
    few = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _objects(inner),
        st.tuples(inner, counts).map(
            lambda found: {"type": "array", "items": found[0], **found[1]}
        ),
        few.map(lambda items: {"type": "array", "prefixItems": items, "minItems": len(items)}),
        few.map(lambda parts: {"anyOf": parts}),
        st.tuples(inner, inner).map(
            lambda parts: {
                "allOf": [
                    {"type": "object", "properties": {"p": parts[0]}, "required": ["p"]},
                    {"type": "object", "properties": {"q": parts[1]}},
                ]
            }
        ),
        inner.map(lambda part: {"type": "object", "additionalProperties": part}),
    )


_TREE = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "required": ["children"],
    "additionalProperties": False,
}
schemas = st.recursive(_LEAVES, _grown, max_leaves=6).map(
    lambda schema: {**schema, "$defs": {"tree": _TREE}}
)
