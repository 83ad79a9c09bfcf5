"""Regular expressions in llguidance's syntax (Rust's) as expressions."""

import math
import re

from text_generation_shard.grammars.language.expressions import (
    Characters,
    Expression,
    Repeat,
    Sequence_,
    Text,
    TooLargeError,
    one_of,
)

_COUNT = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_GROUP = re.compile(r"\(\?(?:P?<[^>]*>|([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)]))")
_NAMED = re.compile(r"\\[pP](?:\{[^}]*\}|.)", re.S)
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{(\w+)\})")
# Parts of a class in which the package `regex` differs from Rust: in Rust `|` is a character, and
# named classes contain ASCII only.
_IN_CLASS = re.compile(rf"{_CODE.pattern}|\\.|\[:(\^?)([a-z]+):\]|\|", re.S)
_ASCII = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
# Most optional parts of a sequence: each is another way to go on.
_MOST_OPTIONAL = 300
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}


def parse(source: str) -> Expression:
    """The expression of a regular expression. ValueError: it is invalid or unsupported."""
    return _Parser(source).whole()


def parse_search(source: str) -> Expression:
    """Texts that contain a match; anchors bind it to the start or end of the text."""
    return _Parser(source, Repeat(Characters(".", "s"))).whole()


class _Parser:
    """Owns the position in a source; see `parse`. Flags are the active letters of `imsx`."""

    def __init__(self, source: str, around: Expression | None = None) -> None:
        """`around`: allowed on each side of a choice that has no anchor."""
        self.source = source
        self.at = 0
        self._around = around
        self._depth = 0

    def whole(self) -> Expression:
        """The expression of the whole source."""
        found = self._choice("")
        if self.at < len(self.source):
            raise ValueError(f"unexpected `{self.source[self.at]}`")
        return found

    def _choice(self, flags: str) -> Expression:
        """Parse alternatives up to a closing bracket."""
        parts: list[Expression] = []
        items: list[Expression] = []
        around = self._around if not self._depth else None
        start = end = False
        while self.at < len(self.source) and self.source[self.at] != ")":
            sign = self.source[self.at]
            if sign == "|":
                self.at += 1
                parts.append(_surrounded(items, None if start else around, None if end else around))
                items, start, end = [], False, False
            elif (found := self._flags(flags)) is not None:
                flags = found
            else:
                start |= sign == "^" or self.source.startswith("\\A", self.at)
                end = sign == "$" or self.source.startswith("\\z", self.at)
                if (item := self._item(flags)) is not None:
                    items.append(self._repeated(item, flags))
        parts.append(_surrounded(items, None if start else around, None if end else around))
        return one_of(parts)

    def _flags(self, flags: str) -> str | None:
        """The flags after `(?i)`; None: not at such a group."""
        found = _GROUP.match(self.source, self.at)
        if found is None or found[3] != ")":
            return None
        self.at = found.end()
        return _changed(flags, found)

    def _item(self, flags: str) -> Expression | None:
        """One character, class or group; None: an anchor, space or comment."""
        sign = self.source[self.at]
        if "x" in flags and sign.isspace():
            self.at += 1
            return None
        if "x" in flags and sign == "#":
            end = self.source.find("\n", self.at)
            self.at = len(self.source) if end < 0 else end + 1
            return None
        if sign == "(":
            return self._group(flags)
        if sign == "[":
            return Characters(self._class(), flags)
        self.at += 1
        if sign in "^$":
            return None
        if sign == ".":
            return Characters(".", flags)
        if sign in "*+?{":
            raise ValueError(f"nothing to repeat before `{sign}`")
        if sign == "\\":
            return self._escaped(flags)
        return _character(sign, flags)

    def _group(self, flags: str) -> Expression:
        found = _GROUP.match(self.source, self.at)
        if found is None and self.source.startswith("(?", self.at):
            raise ValueError("look-around and the like")
        self.at = found.end() if found else self.at + 1
        self._depth += 1
        inner = self._choice(_changed(flags, found) if found and found[3] else flags)
        self._depth -= 1
        if not self.source.startswith(")", self.at):
            raise ValueError("missing `)`")
        self.at += 1
        return inner

    def _repeated(self, item: Expression, flags: str) -> Expression:
        while self.at < len(self.source):
            sign = self.source[self.at]
            least, most = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}.get(sign, (-1, 0))
            end = self.at + 1
            if sign == "{":
                found = _COUNT.match(self.source, self.at)
                if found is None:
                    raise ValueError("unclear repetition")
                least, end = int(found[1]), found.end()
                most = int(found[3]) if found[3] else math.inf if found[2] else least
            if least < 0:
                break
            # Lazy repeats have the same texts.
            self.at = end + self.source.startswith("?", end)
            item = Repeat(item, least, most)
        return item

    def _escaped(self, flags: str) -> Expression | None:
        start = self.at - 1
        if found := _NAMED.match(self.source, start):
            self.at = found.end()
            return Characters(found[0], flags)
        if found := _CODE.match(self.source, start):
            self.at = found.end()
            return _character(chr(int(found[found.lastindex or 0], 16)), flags)
        if self.at >= len(self.source):
            raise ValueError("a backslash at the end")
        sign = self.source[self.at]
        self.at += 1
        if sign in "dDwWsS":
            return Characters("\\" + sign, flags)
        if sign in "Az":
            return None
        if sign.isalnum() and sign not in _CONTROL:
            raise ValueError(f"unknown `\\{sign}`")
        return _character(_CONTROL.get(sign, sign), flags)

    def _class(self) -> str:
        """The source of a class, up to its closing bracket."""
        start, depth = self.at, 0
        while self.at < len(self.source):
            sign = self.source[self.at]
            if sign == "\\":
                self.at += 1
            elif sign == "[":
                depth += 1
                # A closing bracket at the beginning is a member of the class.
                after = self.at + 1 + self.source.startswith("^", self.at + 1)
                if self.source.startswith("]", after):
                    self.at = after
            elif sign == "]":
                depth -= 1
            self.at += 1
            if not depth:
                return _IN_CLASS.sub(_plain, self.source[start : self.at])
        raise ValueError("missing `]`")


def _plain(found: re.Match[str]) -> str:
    if found[6] is not None:
        if found[6] not in _ASCII:
            raise ValueError(f"unknown class {found[0]}")
        return f"[{found[5]}{_ASCII[found[6]]}]"
    if found.lastindex is None:
        return "\\|" if found[0] == "|" else found[0]
    return f"\\U{int(found[found.lastindex], 16):08x}"


def _changed(flags: str, found: re.Match[str]) -> str:
    removed = set(found[2] or "")
    return "".join(sorted({*flags, *(found[1] or "")} - removed))


def _character(sign: str, flags: str) -> Expression:
    if "i" in flags and sign.lower() != sign.upper():
        return Characters(re.escape(sign), flags)
    return Text(sign)


def _joined(items: list[Expression]) -> Expression:
    if sum(isinstance(item, Repeat) and not item.least for item in items) > _MOST_OPTIONAL:
        raise TooLargeError("parts that need not be there")
    return items[0] if len(items) == 1 else Sequence_(items)


def _surrounded(
    items: list[Expression], before: Expression | None, after: Expression | None
) -> Expression:
    """The items with the expressions around them; adjacent literals are joined."""
    merged: list[Expression] = []
    for item in items:
        if merged and isinstance(item, Text) and isinstance(merged[-1], Text):
            merged[-1] = Text("".join(map(str, [*merged[-1].shortest(), *item.shortest()])))
        else:
            merged.append(item)
    return _joined([item for item in (before, *merged, after) if item is not None])
