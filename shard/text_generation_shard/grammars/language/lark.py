"""Grammars in llguidance's Lark as expressions.

Rules become references; terminals (names in capitals) are inlined. Negations (`~`) are ignored, so
that an expression may have more texts than its grammar.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from text_generation_shard.grammars.language.expressions import (
    Characters,
    Choice,
    Expression,
    Reference,
    Repeat,
    Sequence_,
    Text,
    Tokens,
    TooLargeError,
    one_of,
    settle,
)
from text_generation_shard.grammars.language.places import Both, start
from text_generation_shard.grammars.language.regular import parse
from text_generation_shard.grammars.language.schema import schema_expression

_TOKEN = re.compile(
    r"""(?P<space>[ \t\f\r]+|//[^\n]*|\#[^\n]*|\n[ \t\r\n]*(?=\|))
    |(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imsxlu]*)
    |(?P<ids><\[[0-9,\- ]+\]>)
    |(?P<special><[^<>\s]+>)
    |(?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*)
    |(?P<keyword>%[a-z_]+)
    |(?P<number>[0-9]+)
    |(?P<range>\.\.)
    |(?P<sign>->|[:|*+?()\[\]~&{},.=])""",
    re.X | re.S,
)
# Most parts of a grammar with inlined terminals.
_MOST_PARTS = 100_000
_MANY = {"*": (0, float("inf")), "+": (1, float("inf")), "?": (0, 1)}


def lark_expression(source: str, special: Callable[[str], int | None]) -> Expression:
    """The texts of `start`. `special`: the id of a special token by its name. ValueError: the
    grammar uses something unsupported."""
    return _expression(list(_tokens(source)), special)


def _expression(
    tokens: Sequence[tuple[str, Any]], special: Callable[[str], int | None]
) -> Expression:
    reader = _Reader(tokens)
    reader.read()
    return _Builder(reader, special).start()


# An item: its kind, its value, and its least and most repeats.
_Item = tuple[str, Any, int, float]


class _Reader:
    """Owns the tokens of a source, and parses them into rules: choices of sequences of items."""

    def __init__(self, tokens: Sequence[tuple[str, Any]]) -> None:
        self._tokens = tokens
        self._at = 0
        self.rules: dict[str, list[list[_Item]]] = {}
        self.ignored: list[list[list[_Item]]] = []

    def read(self) -> None:
        """Parse all rules. ValueError: unsupported or invalid syntax."""
        while self._at < len(self._tokens):
            kind, value = self._take()
            if kind == "line":
                continue
            if (kind, value) == ("keyword", "%ignore"):
                self.ignored.append(self._choice())
            elif (kind, value) == ("keyword", "%llguidance"):
                self._expect("json")
            elif kind == "name":
                if self._is("["):
                    while self._take()[1] != "]":
                        if self._peek()[1] in ("stop", "suffix", "max_tokens", "stop_capture"):
                            raise ValueError("an attribute")
                if self._is("."):
                    self._expect("number")
                self._expect_sign(":")
                self.rules[value.lstrip("?!")] = self._choice()
            else:
                raise ValueError(f"unexpected {value!r}")

    def _peek(self) -> tuple[str, Any]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("line", "\n")

    def _take(self) -> tuple[str, Any]:
        token = self._peek()
        self._at += 1
        return token

    def _is(self, sign: str) -> bool:
        """Take the sign if it is next; whether it was."""
        if self._peek() == ("sign", sign):
            self._at += 1
            return True
        return False

    def _expect(self, kind: str) -> Any:
        found, value = self._take()
        if found != kind:
            raise ValueError(f"unexpected {value!r}")
        return value

    def _expect_sign(self, sign: str) -> None:
        if not self._is(sign):
            raise ValueError(f"`{sign}` is missing")

    def _choice(self) -> list[list[_Item]]:
        choices = [self._all_of()]
        while self._is("|"):
            choices.append(self._all_of())
        return choices

    def _all_of(self) -> list[_Item]:
        """A sequence, or an intersection of several."""
        ways = [self._items()]
        while self._is("&"):
            ways.append(self._items())
        return ways[0] if len(ways) == 1 else [("all", ways, 1, 1)]

    def _items(self) -> list[_Item]:
        items: list[_Item] = []
        while True:
            kind, value = self._peek()
            if kind == "line" or value in ("|", ")", "]", "&"):
                return items
            if value == "->":
                self._at += 2
                continue
            if self._is("~"):
                items.append(("not", self._item()[1], 1, 1))
                continue
            items.append(self._item())

    def _item(self) -> _Item:
        kind, value = self._take()
        if (kind, value) in (("sign", "("), ("sign", "[")):
            inner = self._choice()
            self._expect_sign(")" if value == "(" else "]")
            return self._counted(("choice", inner, int(value == "("), 1))
        if kind == "keyword" and value == "%json":
            return self._counted(("json", self._expect("json"), 1, 1))
        if kind == "keyword" and value == "%lark":
            return self._counted(("lark", self._block(), 1, 1))
        if kind == "string" and self._peek()[0] == "range":
            self._at += 1
            return self._counted(("range", (value, self._expect("string")), 1, 1))
        if kind not in ("string", "regex", "ids", "special", "name"):
            raise ValueError(f"unexpected {value!r}")
        return self._counted((kind, value, 1, 1))

    def _block(self) -> Sequence[tuple[str, Any]]:
        """The tokens in braces."""
        self._expect_sign("{")
        start, depth = self._at, 1
        while depth:
            if self._at == len(self._tokens):
                raise ValueError("`}` is missing")
            kind, value = self._take()
            if kind == "sign":
                depth += (value == "{") - (value == "}")
        return self._tokens[start : self._at - 1]

    def _counted(self, item: _Item) -> _Item:
        kind, value, least, _ = item
        sign = self._peek()[1]
        if sign in _MANY and self._is(str(sign)):
            many, limit = _MANY[str(sign)]
            return kind, value, min(many, least), limit
        # `a ~ 2..3`; a tilde before a name negates the name.
        following = self._tokens[self._at + 1][0] if self._at + 1 < len(self._tokens) else ""
        if sign == "~" and following == "number":
            self._at += 1
            first = int(self._expect("number"))
            last = first
            if self._peek()[0] == "range":
                self._at += 1
                last = int(self._expect("number"))
            return kind, value, first, last
        if self._is("{"):
            low = int(self._take()[1]) if self._peek()[0] == "number" else 0
            high: float = low
            if self._is(","):
                high = int(self._take()[1]) if self._peek()[0] == "number" else float("inf")
            self._expect_sign("}")
            return kind, value, low, high
        return item


def _tokens(source: str) -> Any:
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise ValueError(f"unexpected {source[at]!r}")
        at = found.end()
        kind, text = found.lastgroup, found[0]
        if kind == "space":
            continue
        if kind == "keyword" and text not in ("%json", "%ignore", "%llguidance", "%lark"):
            raise ValueError(f"unknown {text}")
        yield kind, text
        if text in ("%json", "%llguidance"):
            at += len(source[at:]) - len(source[at:].lstrip())
            value, at = json.JSONDecoder().raw_decode(source, at)
            yield "json", value


class _Builder:
    """Owns the expressions of a grammar's rules."""

    def __init__(self, reader: _Reader, special: Callable[[str], int | None]) -> None:
        self._rules, self._special = reader.rules, special
        self._references: dict[str, Reference] = {}
        self._terminals: dict[str, Expression | None] = {}
        # Parts of each terminal, and of the rule or terminal being built.
        self._sizes: dict[str, int] = {}
        self._size = 0
        self._ignored: Expression | None = None
        ignored = [self._choice(choices, "IGNORED") for choices in reader.ignored]
        if ignored:
            self._ignored = Repeat(Choice(ignored))

    def start(self) -> Expression:
        """The expression of the rule `start`."""
        found = self._named("start")
        settle(list(self._references.values()))
        return found

    def _named(self, name: str) -> Expression:
        if name not in self._rules:
            raise ValueError(f"unknown name {name}")
        if name.isupper():
            return self._terminal(name)
        if name not in self._references:
            reference = self._references[name] = Reference(name)
            reference.target = self._rule(name)
        return self._references[name]

    def _terminal(self, name: str) -> Expression:
        """The expression of a terminal. ValueError: it contains itself, or is too large."""
        if name not in self._terminals:
            self._terminals[name] = None
            outside, self._size = self._size, 0
            self._terminals[name] = self._choice(self._rules[name], name)
            self._sizes[name], self._size = self._size, outside
        if (found := self._terminals[name]) is None:
            raise ValueError(f"{name} holds itself")
        self._size += self._sizes[name]
        if self._size > _MOST_PARTS:
            raise TooLargeError("names that hold one another several times")
        return found

    def _rule(self, name: str) -> Expression:
        """The expression of a rule; left recursion becomes a repeat."""
        choices = self._rules[name]
        ends = [way[1:] for way in choices if way and way[0][:3] == ("name", name, 1)]
        if not ends:
            return self._choice(choices, name)
        others = [way for way in choices if not way or way[0][:3] != ("name", name, 1)]
        return Sequence_([self._choice(others, name), Repeat(self._choice(ends, name))])

    def _choice(self, choices: Sequence[Sequence[_Item]], name: str) -> Expression:
        parts = [self._sequence(way, name) for way in choices]
        return one_of(parts)

    def _sequence(self, items: Sequence[_Item], name: str) -> Expression:
        parts: list[Expression] = []
        for kind, value, least, most in items:
            part = self._one(kind, value, name)
            if self._ignored is not None and not name.isupper():
                part = Sequence_([self._ignored, part, self._ignored])
            parts.append(part if least == most == 1 else Repeat(part, least, most))
        return parts[0] if len(parts) == 1 else Sequence_(parts)

    def _one(self, kind: str, value: Any, name: str) -> Expression:
        self._size += 1
        if kind == "choice":
            return self._choice(value, name)
        if kind == "all":
            wanted = [way for way in value if not (len(way) == 1 and way[0][0] == "not")]
            parts = [self._sequence(way, name) for way in wanted]
            return parts[0] if len(parts) == 1 else Both([start(part) for part in parts])
        if kind == "name":
            return self._named(value.lstrip("?!"))
        if kind == "json":
            return schema_expression(value)
        if kind == "lark":
            return _expression(value, self._special)
        if kind == "string":
            return _string(value)
        if kind == "range":
            first, last = (re.escape(json.loads(text)) for text in value)
            return Characters(f"[{first}-{last}]")
        if kind == "regex":
            body, _, flags = value[1:].rpartition("/")
            return parse(f"(?{flags}:{body})" if flags else body)
        if kind == "ids":
            return Tokens(_ids(value))
        if kind == "special" and (token := self._special(value)) is not None:
            return Text((token,))
        raise ValueError(f"unknown {value!r}")


def _string(value: str) -> Expression:
    if not value.endswith("i"):
        return Text(json.loads(value))
    return parse(f"(?i:{re.escape(json.loads(value[:-1]))})")


def _ids(value: str) -> Sequence[int]:
    found: list[int] = []
    for part in value[2:-2].split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
