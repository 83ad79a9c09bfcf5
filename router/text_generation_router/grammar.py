"""Checks grammars, writes them in llguidance's form and lets the shards compile them."""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

import orjson
from llguidance.gbnf_to_lark import gbnf_to_lark

from text_generation_router.client.recovery import WatchedShards
from text_generation_router.errors import GrammarError, OverloadedError
from text_generation_router.request import Grammar

# Of a schema without annotations, regular expression or Lark grammar, in UTF-8; and of a schema
# with its annotations.
MAX_SOURCE_BYTES, _MAX_READ_BYTES = 65_536, 1 << 20
# Nesting of schemas.
MAX_DEPTH = 64
COMPILE_TIMEOUT_S = 10.0
# Of GBNF. The translation takes time in proportion to the product of both. It is Python code: other
# threads run at half speed meanwhile.
MAX_RULES, MAX_GBNF_BYTES = 256, 16_384
_SHOWN_CHARACTERS = 200
# Their texts take about 16 MiB: see MAX_SOURCE_BYTES.
_CACHED_GRAMMARS = 256

# At most one space where JSON allows whitespace, as in TGI: whitespace can not go on forever.
_JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": "[\\x20]?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
# Keywords whose values hold schemas: by name, in a list, or one.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_HOLDING = frozenset({*_NAMED, *_LISTED, *_SINGLE})
# Keywords that allow and forbid no value.
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "example", "examples", "$comment"}
    | {"deprecated", "readOnly", "writeOnly"}
)
# Keywords without effect unless their value is the URI that others refer to, or a known dialect.
_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-]*:[\w\-.~:/?#@!$&'()*+,;=%]*", re.A)
_IDENTIFIERS = {"$id": _URI, "id": _URI, "$schema": re.compile(r"https?://json-schema\.org/[!-~]*")}
# Patterns of a few names: an escaped sign, one of several, or a plain one after another.
_WHOLE = re.compile(r"\^(\((?:\?:)?)?(.*)(?(1)\))\$", re.S)
_LETTER = re.compile(r"\\([^\w\s])|\[([\w ]+)\]|([\w \-@/:,;#%&=<>!~'\"])")
_MOST_NAMES = 64
# Keywords next to which a closed object could exclude properties that another schema requires.
_COMBINING = frozenset({"anyOf", "oneOf", "allOf", "$ref", "patternProperties"})
_LINE = re.compile(r"^line \d+: ")
# Of a Lark grammar: strings, regular expressions and comments, and a token by its name. Their ends
# are optional, so that the search takes linear time.
_LARK_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|/(?!/)(?:\\.|[^/\\\n])+/?|(?://|#)[^\n]*|(?P<token><[^<>\s]+>)'
)
# Characters that must be escaped between slashes.
_SIGNS = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
# One piece of an expression. Escapes and character classes are whole pieces.
_PIECE = re.compile(
    r"""(?P<comment>\(\?\#[^)]*\))
    |(?P<refused>\(\?>|\(\?P=|\\k[<{]|\(\?\()
    |(?P<end>\\Z)
    |(?P<most>\{,(?=\d+\}))
    |(?P<possessive>(?:[*+?]|\{\d+(?:,\d*)?\})\+)
    |(?P<class>\[\^?\]?(?:\\.|\[\^?(?:\\.|[^\\\]])*\]|[^\\\]\[])*\])
    |(?P<unclosed>(?:\[|\(\?\#).*)
    |(?P<other>\\.|.)""",
    re.X | re.S,
)
_REFUSED = {
    "(?>": "atomic groups are not supported; write `(?:…)`",
    "(?P": "backreferences are not supported",
    "\\k": "backreferences are not supported",
    "(?(": "conditions are not supported",
}
# Keywords that define a value without `type`.
_OTHER_TYPES = frozenset({"enum", "const", "$ref"})
# An object without any of these is probably not a schema; TGI requires `properties`.
_KEYWORDS = frozenset({*_HOLDING, "type", "enum", "const", "$ref", "not", "if"})


class GrammarCompiler:
    """Owns the cache of compiled grammars. Used from one event loop."""

    def __init__(
        self,
        shards: WatchedShards,
        is_enabled: bool,
        added_ids: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`added_ids`: the added tokens of the tokenizer, which Lark may name."""
        self._shards = shards
        self._added_ids = added_ids
        self._is_enabled = is_enabled
        self._known: OrderedDict[tuple[str, bytes], tuple[str, int]] = OrderedDict()

    async def compile(self, grammar: Grammar) -> tuple[str, int]:
        """The source for the shards, and the tokens of the shortest text. Raises GrammarError, with
        the reason, and OverloadedError."""
        if not self._is_enabled:
            raise GrammarError("grammar is not supported")
        key = (grammar.kind, sha256(grammar.source.encode()).digest())
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        text = await asyncio.to_thread(write, grammar, self._added_ids)
        try:
            result = await self._shards.compile_grammar(text, COMPILE_TIMEOUT_S)
        except TimeoutError as late:
            raise GrammarError(
                f"grammar is too complex: it could not be compiled within {COMPILE_TIMEOUT_S:g} s; "
                "make it smaller"
            ) from late
        if result.retry_after_s:
            raise OverloadedError(result.retry_after_s, f"Model is overloaded: {result.error}")
        if result.error:
            is_schema = grammar.kind == "json_schema"
            reason = "cannot compile regex from schema" if is_schema else "grammar is not valid"
            error = result.error
            if grammar.kind != "lark":
                error = _LINE.sub("", error)  # not one of the client's lines
            raise GrammarError(f"{reason}: {error}")
        compiled = self._known[key] = text, result.min_tokens
        if len(self._known) > _CACHED_GRAMMARS:
            self._known.popitem(last=False)
        return compiled


def write(grammar: Grammar, added_ids: Mapping[str, int] = MappingProxyType({})) -> str:
    """The grammar in llguidance's form. Raises GrammarError for errors found without compiling."""
    if grammar.kind == "json_schema":
        return _wrap({"json_schema": checked_schema(grammar.source)})
    return _wrap({"lark_grammar": _with_ids(_lark(grammar), added_ids)})


def as_item(grammar: Grammar) -> str:
    """The grammar as an item of a rule in Lark. Raises GrammarError as `write`."""
    if grammar.kind == "json_schema":
        return f"%json {json.dumps(checked_schema(grammar.source))}"
    return f"%lark {{\n{_lark(grammar)}\n}}"


def _lark(grammar: Grammar) -> str:
    _check_size(grammar.source)
    if grammar.kind == "regex":
        return f"start: /{_escaped(rust(grammar.source))}/"
    return _lark_of_gbnf(grammar.source) if grammar.kind == "gbnf" else grammar.source


def _with_ids(lark: str, added_ids: Mapping[str, int]) -> str:
    """The grammar with ids instead of names: llguidance knows only special tokens by their names,
    and not every added token is special."""

    def written(found: re.Match[str]) -> str:
        token_id = added_ids.get(found["token"])
        return found[0] if token_id is None else f"<[{token_id}]>"

    return _LARK_PART.sub(written, lark)


def _check_size(source: str, most: int = MAX_SOURCE_BYTES) -> None:
    size = len(source.encode())
    if size > most:
        raise GrammarError(
            f"grammar is too large: its source must have at most {most} bytes. Given: {size}"
        )


def _wrap(grammar: Mapping[str, Any]) -> str:
    try:
        return orjson.dumps({"grammars": [grammar]}).decode()
    except TypeError as error:  # the only possible reason is its depth
        raise GrammarError(f"grammar is too large: {error}; nest its values less") from error


def rust(regex: str) -> str:
    """An expression of Python, JavaScript or PCRE in the syntax of Rust, for llguidance: what Rust
    spells differently is rewritten. Raises GrammarError for what Rust would read with another
    meaning; llguidance refuses the rest itself."""
    return _PIECE.sub(_written, regex)


def _written(found: re.Match[str]) -> str:
    kind, text = found.lastgroup, found[0]
    if kind == "refused":
        raise _not_valid(_REFUSED.get(text[:3]) or _REFUSED[text[:2]])
    if kind == "possessive":
        raise _not_valid(
            f"possessive repetitions are not supported; write `{text[:-1]}` in place of `{text}`"
        )
    return {"comment": "", "end": r"\z", "most": "{0,"}.get(str(kind), text)


def _lark_of_gbnf(source: str) -> str:
    """GBNF, llama.cpp's form of EBNF that vLLM's clients send, in Lark. Raises GrammarError."""
    count, size = source.count("::="), len(source.encode())
    if count > MAX_RULES or size > MAX_GBNF_BYTES:
        raise GrammarError(
            f"grammar is too large: GBNF may have at most {MAX_RULES} rules and {MAX_GBNF_BYTES} "
            f"bytes; write it in Lark. Given: {count} rules and {size} bytes"
        )
    try:
        return gbnf_to_lark(source)
    except RecursionError as error:
        raise GrammarError("grammar is too large: nest its rules less") from error
    except Exception as error:  # the library raises `Exception` itself
        raise _not_valid(f"not GBNF: {str(error)[:_SHOWN_CHARACTERS]}") from error


def _escaped(regex: str) -> str:
    """A regular expression for use between slashes: on one line, with slashes escaped."""

    def written(found: re.Match[str]) -> str:
        # A line end after a backslash, too.
        return _SIGNS.get(found[0][-1], found[0])

    return re.sub(r"\\.|[/\n\r]", written, regex, flags=re.S)


def checked_schema(source: str) -> dict[str, Any]:
    """The schema with our options. Objects are closed where the schema does not say whether other
    properties are allowed. Raises GrammarError."""
    _check_size(source, _MAX_READ_BYTES)
    try:
        schema = orjson.loads(source)
    except orjson.JSONDecodeError as error:
        raise _not_valid(str(error)) from error
    if not isinstance(schema, dict):
        raise _not_valid("a JSON schema must be an object")
    schema = plain_schema(schema)
    _check_size(_wrap(schema))
    if schema and not schema.keys() & _KEYWORDS:
        raise _not_valid("Grammar must have a 'properties' field")
    is_closed = True
    parts = list(_parts(schema, 1))
    for part in parts:
        _check(part)
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = rust(pattern)
        if "properties" in part and not part.keys() & _OTHER_TYPES:
            # As in TGI; by JSON Schema's rules a number would be valid, too.
            part.setdefault("type", "object")
        is_closed &= not ("properties" in part and part.keys() & _COMBINING) and "allOf" not in part
    if is_closed:
        # As in TGI: objects have only the named properties.
        for part in parts:
            if part.get("properties"):
                part.setdefault("additionalProperties", False)
    return {**schema, "x-guidance": _JSON_OPTIONS}


def plain_schema(schema: Any, depth: int = 1) -> Any:
    """The schema without annotations, and without identifiers that are no URIs."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        pattern = _IDENTIFIERS.get(key)
        if key in _ANNOTATIONS or (pattern and not pattern.fullmatch(str(value))):
            continue
        if key in _NAMED and isinstance(value, Mapping):
            value = {name: plain_schema(part, depth + 1) for name, part in value.items()}
        elif key in _LISTED and isinstance(value, list):
            value = [plain_schema(part, depth + 1) for part in value]
        elif key in _SINGLE:
            value = plain_schema(value, depth + 1)
        plain[key] = value
    if "properties" in plain or plain.get("type") == "object":
        _name_properties(plain)
    return plain


def _name_properties(schema: dict[str, Any]) -> None:
    """Writes patterns that match a few names as properties: with all these names taken, the
    compiler would allow a comma that no member can follow."""
    patterns, named = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(named, dict):
        return
    rest: dict[str, Any] = {}
    parts = {name: [] if part is True else [part] for name, part in named.items()}
    room = _MOST_NAMES
    for pattern, part in patterns.items():
        names = _names_of(pattern)
        # Schemas that hold others are written once: copies of copies would grow exponentially.
        has_schemas = isinstance(part, Mapping) and not part.keys().isdisjoint(_HOLDING)
        if not names or len(names) > min(room, 1 if has_schemas else _MOST_NAMES):
            rest[pattern] = part
            continue
        room -= len(names)
        for name in names:
            parts.setdefault(name, []).append(part)
    if len(rest) < len(patterns):
        del schema["patternProperties"]
        schema["properties"] = {name: _together(found) for name, found in parts.items()}
        schema |= {"patternProperties": rest} if rest else {}
        schema.setdefault("additionalProperties", True)


def _together(parts: list[Any]) -> Any:
    """A schema of what all the parts allow."""
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _names_of(pattern: str) -> list[str]:
    """All names that a pattern matches; none if they are many, or the pattern is not simple."""
    whole = _WHOLE.fullmatch(pattern)
    if whole is None or ("|" in whole[2] and not whole[1]):
        return []
    names: list[str] = []
    for way in whole[2].split("|"):
        pieces = list(_LETTER.finditer(way))
        if "".join(piece[0] for piece in pieces) != way or len(pieces) > 64:
            return []
        choices = [piece[1] or piece[2] or piece[3] for piece in pieces]
        if prod(map(len, choices)) > _MOST_NAMES:
            return []
        names += map("".join, product(*choices))
    return names if len(names) <= _MOST_NAMES else []


def _parts(schema: Any, depth: int) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it. Raises GrammarError."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        raise GrammarError(
            f"grammar is too large: its schemas must be nested at most {MAX_DEPTH} deep"
        )
    yield schema
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            value = list(value.values())
        elif keyword in _SINGLE:
            value = [value]
        elif keyword not in _LISTED:
            continue
        for part in value if isinstance(value, list) else ():
            yield from _parts(part, depth + 1)


def _check(schema: Mapping[str, Any]) -> None:
    """Raises GrammarError for keywords that the compiler would not apply correctly."""
    if isinstance(schema.get("items"), list):
        raise _not_valid("`items` must be a schema; use `prefixItems` for a list of schemas")
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(keyword), bool):
            raise _not_valid(f"`{keyword}` must be a number")
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        # The compiler would count repeated properties several times.
        raise _not_valid(
            "`minProperties` must be at most one more than the properties in `required`"
        )
    if "x-guidance" in schema:
        raise _not_valid("`x-guidance` is not supported; remove it")


def _not_valid(reason: str) -> GrammarError:
    return GrammarError(f"grammar is not valid: {reason}")
