"""Parses reasoning, text and tool calls from an answer incrementally."""

import json
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import regex

from text_generation_router.chat.format import (
    ARGUMENT_NAME,
    BARE_NAME,
    ChatFormat,
    Parameters,
    ToolSpec,
)

# JSON's whitespace.
_SPACE = " \t\r\n"
_ANY_SPACE = rf"[{_SPACE}]*"
# Held back before a marker: models write a few line ends, and what is held is searched again.
_SPACE_BEFORE = rf"[{_SPACE}]{{0,64}}"
_NAME = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){1,256}"'
_SCALAR = r"null|None|true|True|false|False|"
# Longer numbers are texts: Python reads no integer of thousands of digits.
_SCALAR += r"-?(?:0|[1-9]\d{0,300})(?:\.\d{1,300})?(?:[eE][+-]?\d{1,300})?"

# Before a message of a channel; groups 1 and 3 are the function that it calls, 2 is the channel.
_TO = r"(?:\s*to=(?:functions\.)?([^\s<]+))?"
_HEADER = regex.compile(
    rf"\s*(?:<\|start\|>assistant)?{_TO}\s*<\|channel\|>(\w+){_TO}"
    r"[^<]{0,64}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>"
)
_MESSAGE_END = regex.compile(r"<\|(?:end|call|return)\|>")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a function; `index` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments

Made = TypeVar("Made")
_Reading = Generator[None, None, Made]


class ChatParser:
    """The state of one answer.

    The events, with adjacent ones of one kind joined, do not depend on how the text is split.
    Calls have the form that `constraint.answer_grammar` allows. Text that looks like a call but is
    not one is content, markers included. Once a call's name and the first character of its
    arguments are read it is a call, even if the arguments never end. Whitespace around markers is
    dropped with them. Nothing else is dropped.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        parses_tools: bool,
        starts_in_reasoning: bool = False,
        tools: Iterable[ToolSpec] = (),
    ) -> None:
        """`tools` say which arguments are texts where the format does not."""
        self._format = chat_format
        self._tools = {tool.name: tool for tool in tools}
        self._parses_tools = parses_tools
        self.has_reasoned = starts_in_reasoning
        """Whether reasoning has begun; it can only come first."""
        self.is_reasoning = starts_in_reasoning
        """Whether reasoning has begun and not ended."""
        self._num_calls = 0
        self._events: list[ChatEvent] = []
        # Text that no event has; and whether no more follows.
        self._text = ""
        self._has_ended = False
        self._answer = self._read_answer()
        next(self._answer)

    def feed(self, text: str) -> list[ChatEvent]:
        """The events that the next piece of text completes."""
        self._text += text
        next(self._answer)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ChatEvent]:
        """The events of the text that is left when the answer ends."""
        self._has_ended = True
        next(self._answer, None)
        return self._events

    # Each of these reads a part of the answer, and yields where it needs more text: it goes on
    # after `feed`, or with the text it had after `finish`.

    def _read_answer(self) -> _Reading[None]:
        yield
        if self._format.has_channels:
            yield from self._read_messages()
            return
        if self._format.reasoning is not None:
            begin, end = self._format.reasoning
            if self.has_reasoned or (yield from self._skip(begin)):
                self.has_reasoned = self.is_reasoning = True
                yield from self._skip_space()
                yield from self._show_until(_marker(end, _SPACE_BEFORE), ReasoningDelta)
                self.is_reasoning = False
                yield from self._skip_space()
        response = self._format.response
        is_response = response is not None and (yield from self._skip(response[0]))
        if is_response:
            yield from self._skip_space()
        found = None
        if self._parses_tools and self._format.is_bare:
            found = yield from self._match(_call(self._format, is_next=False))
        opening = _opening(self._format, self._parses_tools, is_response)
        while True:
            while found is not None and found.lastindex:
                found = yield from self._read_call(found)
            if self._has_ended and self._num_calls:
                break
            found = yield from self._show_until(opening, ContentDelta)
            if found is None:
                return
            if not found.lastindex:
                yield from self._skip_space()
        # The end of the last call is missing: that is no error. A call after it is text.
        if "{" in self._text:
            self._events.append(ContentDelta(self._text))

    def _read_messages(self) -> _Reading[None]:
        """Messages of channels. Text without a header is content."""
        while True:
            header = yield from self._match(_HEADER)
            if header is not None and (name := header[1] or header[3]) and self._parses_tools:
                self._events.append(ToolCallStart(self._num_calls, name))
                self._num_calls += 1
                yield from self._read_json(self._num_calls - 1)
                yield from self._skip("<|call|>")
                continue
            self.is_reasoning = header is not None and header[2] == "analysis"
            self.has_reasoned |= self.is_reasoning
            kind = ReasoningDelta if self.is_reasoning else ContentDelta
            if (yield from self._show_until(_MESSAGE_END, kind)) is None:
                return
            self.is_reasoning = False

    def _read_call(self, found: "regex.Match[str]") -> _Reading["regex.Match[str] | None"]:
        """A call after its head, and the head of the next one if it directly follows."""
        form, name = self._format, found[1]
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._events.append(
            ToolCallStart(index, name if form.arguments_marker else json.loads(name))
        )
        if form.parameters is None:
            has_arguments = yield from self._read_json(index)
        else:
            has_arguments = yield from self._read_parameters(form.parameters, name, index)
        if not has_arguments:
            return None
        if not form.arguments_marker and not (yield from self._skip("}")):
            return None
        if not form.wraps_each:
            following = yield from self._match(_call(form, is_next=True))
            if following is not None:
                return following
        if form.is_list and not (yield from self._skip("]")):
            return None
        if form.end and not (yield from self._skip(form.end)):
            return None
        yield from self._skip_space()
        return None

    def _read_json(self, index: int, stops: str = "<") -> _Reading[bool]:
        """A value in JSON, up to its last bracket or what precedes one of the characters `stops`;
        whether it ends."""
        depth, in_string, is_escaped, has_ended = 0, False, False, False
        while True:
            length = 0
            for length, character in enumerate(self._text, start=1):
                if is_escaped:
                    is_escaped = False
                elif in_string:
                    is_escaped = character == "\\"
                    in_string = character != '"'
                elif character == '"':
                    in_string = True
                elif character in stops and not depth:
                    has_ended = True
                    length -= 1
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    has_ended = not depth
                if has_ended:
                    break
            self._events.append(ToolCallArguments(index, self._text[:length]))
            self._text = self._text[length:]
            if has_ended or self._has_ended:
                return has_ended
            yield

    def _read_parameters(self, form: Parameters, function: str, index: int) -> _Reading[bool]:
        """Arguments that are written one by one, shown as a JSON object; whether they end."""
        before, text_end, scalar = _parameter_patterns(form)
        tool = self._tools.get(function, ToolSpec(function))
        stops = form.after_value[:1] or form.separator[0] + form.close
        shown = "{"
        while (found := (yield from self._match(before))) is not None:
            is_bare = bool(form.after_value) and tool.may_be(found[1], "string")
            shown += f"{json.dumps(found[1], ensure_ascii=False)}: "
            is_mixed = is_bare and tool.may_be(found[1], "null", "boolean", "integer", "number")
            if is_mixed and (other := (yield from self._match(scalar))) is not None:
                shown += tool.bare_json(found[1], other[1]) + ", "
                continue
            is_text = found[2] or is_bare
            shown += '"' if is_text else ""
            self._events.append(ToolCallArguments(index, shown))
            if is_text:
                has_ended = yield from self._show_until(
                    text_end,
                    lambda text: ToolCallArguments(
                        index, json.dumps(text, ensure_ascii=False)[1:-1]
                    ),
                )
            else:
                has_ended = (yield from self._read_json(index, stops)) and (
                    yield from self._skip(form.after_value)
                )
            if not has_ended:
                return False
            shown = '", ' if is_text else ", "
        has_ended = yield from self._skip(form.close)
        self._events.append(ToolCallArguments(index, shown.rstrip(", ") + "}" * has_ended))
        return has_ended

    def _show_until(
        self, pattern: "regex.Pattern[str] | None", kind: Callable[[str], ChatEvent]
    ) -> _Reading["regex.Match[str] | None"]:
        """Shows the text before the first match and drops the match; None: there is none."""
        while True:
            found = pattern and pattern.search(self._text, partial=not self._has_ended)
            start = len(self._text) if found is None else found.start()
            if shown := self._text[:start]:
                self._events.append(kind(shown))
            if found is not None and not found.partial:
                self._text = self._text[found.end() :]
                return found
            self._text = self._text[start:]
            if self._has_ended:
                return None
            yield

    def _match(self, pattern: "regex.Pattern[str]") -> _Reading["regex.Match[str] | None"]:
        """Drops what the pattern matches at the start of the text; None: it does not."""
        while (found := pattern.match(self._text, partial=not self._has_ended)) is not None:
            if not found.partial:
                self._text = self._text[found.end() :]
                return found
            yield
        return None

    def _skip(self, marker: str) -> _Reading[bool]:
        """Drops a marker with the whitespace before and in it; whether it is there."""
        return not marker or (yield from self._match(_marker(marker))) is not None

    def _skip_space(self) -> _Reading[None]:
        while not (text := self._text.lstrip(_SPACE)) and not self._has_ended:
            yield
        self._text = text


# The patterns of markers. None may match the empty text.


@cache
def _opening(form: ChatFormat, has_calls: bool, is_response: bool) -> "regex.Pattern[str] | None":
    """The first marker in a text: the head of a call, or the end of a response."""
    options = []
    if has_calls and form.begin:
        before = _loose(form.begin) + (rf"{_ANY_SPACE}\[" if form.is_list else "")
        options.append(_SPACE_BEFORE + before + _head(form))
    if is_response and form.response is not None:
        options.append(_SPACE_BEFORE + _loose(form.response[1]) + _ANY_SPACE)
    return regex.compile("|".join(options)) if options else None


@cache
def _call(form: ChatFormat, is_next: bool) -> "regex.Pattern[str]":
    """The head of a call without a begin marker; `is_next`: after another one."""
    if not is_next:
        return regex.compile(_head(form))
    separator = form.separator.strip()
    between = "," if form.is_list else _loose(separator) + "?" * (len(separator) == 1)
    return regex.compile(_ANY_SPACE + between + _head(form))


def _head(form: ChatFormat) -> str:
    """A call up to its arguments; group 1 is its name. Arguments or their end must follow."""
    space, escape, one = _ANY_SPACE, re.escape, form.parameters
    if form.arguments_marker:
        name = rf"({BARE_NAME.pattern}){_loose(form.arguments_marker)}"
    else:
        key = escape(form.arguments_key)
        name = rf'\{{{space}"name"{space}:{space}({_NAME}){space},{space}"{key}"{space}:'
    follow = r"\{"
    if one is not None:
        first = escape(one.before_name) or r"[\w.$@/-]"  # of an ARGUMENT_NAME
        follow = rf"{first}|{escape(one.close)}"
    return rf"{space}{name}{space}(?={follow})"


@cache
def _parameter_patterns(form: Parameters) -> tuple["regex.Pattern[str]", ...]:
    """What stands before a value, with the argument's name and a quote; what ends a text; a value
    that may be a text or not, with that end."""
    space, escape = _ANY_SPACE, re.escape
    separator = f"(?:{escape(form.separator.strip())})?"
    before, behind = _loose(form.before_name), _loose(form.after_name.rstrip())
    # One line end belongs to the marker, others to the text.
    line_end = r"(?:\n|(?=[^\n]))" if form.after_name.endswith("\n") else ""
    last_line_end = r"\n?" if form.after_value.startswith("\n") else ""
    text_end = last_line_end + escape(form.quote or form.after_value.strip())
    quote = f"({escape(form.quote)}|(?=[^{form.quote[:1]}]))" if form.quote else "()"
    return (
        regex.compile(
            f"{space}{separator}{space}{before}({ARGUMENT_NAME.pattern}){space}"
            f"{behind}{line_end}{quote}"
        ),
        regex.compile(text_end),
        regex.compile(f"({_SCALAR}){text_end}"),
    )


@cache
def _marker(marker: str, before: str = _ANY_SPACE) -> "regex.Pattern[str]":
    """The marker, and the whitespace before it."""
    return regex.compile(before + _loose(marker.strip()))


def _loose(marker: str) -> str:
    """Matches a marker with any whitespace where it has some."""
    parts = re.split(rf"[{_SPACE}]+", marker)
    return _ANY_SPACE.join(re.escape(part) for part in parts)
