"""Parses reasoning, text and tool calls from an answer incrementally."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from text_generation_router.chat.format import BARE_NAME, ChatFormat

# JSON's whitespace.
_SPACE = " \t\r\n"
# The start of an object that no continuation makes valid JSON.
_NO_OBJECT = re.compile(r'\{[ \t\r\n]*[^ \t\r\n"}]')


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


class ChatParser:
    """The state of one answer.

    The events, with adjacent ones of one kind joined, do not depend on how the text is split:
    a step consumes only a prefix whose meaning no continuation can change. Text that looks like a
    call but is not one is content, markers included. Once a call's name and the first character of
    its arguments are read it is a call, even if the arguments never end. Whitespace around markers
    is dropped with them. Nothing else is dropped.
    """

    def __init__(
        self, chat_format: ChatFormat, *, parses_tools: bool, starts_in_reasoning: bool = False
    ) -> None:
        self._format = chat_format
        self._begin = chat_format.begin if parses_tools else ""
        self._is_bare = parses_tools and chat_format.is_bare
        self._head = re.compile(
            r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
            rf'"{chat_format.arguments_key}"\s*:\s*(?=\{{)',
            re.ASCII,
        )
        # Text that no step has consumed, and consumed text that may or may not belong to a call.
        self._text = ""
        self._undecided = ""
        self._calls = 0
        self._in_list = False
        self._end_of_value = _EndOfValue()
        self._events: list[ChatEvent] = []
        self.has_reasoned = starts_in_reasoning
        """Whether reasoning has begun; it can only come first."""
        # In these steps the unconsumed text is only whitespace and parts of markers.
        self._skipping: tuple[Callable[[], bool], ...] = (
            self._skip_to_reasoning,
            self._skip_to_answer,
            self._close_object,
            self._close_call,
            self._close,
            self._pause,
        )
        # Each step consumes what it can of the text, and returns whether to run the next step.
        self._step: Callable[[], bool] = self._skip_to_reasoning
        if not starts_in_reasoning:
            self._step = self._start if chat_format.reasoning else self._start_answer

    def feed(self, text: str) -> list[ChatEvent]:
        """The events that the next piece of text completes."""
        self._text += text
        while self._text and self._step():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ChatEvent]:
        """The events of the text that is left when the answer ends."""
        rest = self._undecided + self._text
        if self._step == self._reason:
            self._show_reasoning(rest)
        elif self._step not in self._skipping:
            self._show(rest)
        events, self._events = self._events, []
        self._text = self._undecided = ""
        return events

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._step in (self._skip_to_reasoning, self._reason)

    # Reasoning

    def _start(self) -> bool:
        """At the first character, the only place where reasoning may begin."""
        assert self._format.reasoning is not None
        length = self._starts_with(self._format.reasoning[0])
        if length is None:
            return False
        self._text = self._text[length:]
        self.has_reasoned = length > 0
        return self._go_on(self._skip_to_reasoning if length else self._start_answer)

    def _skip_to_reasoning(self) -> bool:
        self._text = self._text.lstrip(_SPACE)
        self._step = self._reason if self._text else self._step
        return bool(self._text)

    def _reason(self) -> bool:
        assert self._format.reasoning is not None
        end = self._format.reasoning[1]
        text, marker, behind = self._text.partition(end)
        if marker:
            self._show_reasoning(text.rstrip(_SPACE))
            self._text = behind
            self._step = self._skip_to_answer
            return True
        held = _end_of_certain(self._text, end)
        self._show_reasoning(self._text[:held])
        self._text = self._text[held:]
        return False

    def _skip_to_answer(self) -> bool:
        self._text = self._text.lstrip(_SPACE)
        self._step = self._start_answer if self._text else self._step
        return bool(self._text)

    # Text

    def _start_answer(self) -> bool:
        """At the first character of the answer: `{` begins a call if calls may have no marker."""
        text = self._text.lstrip(_SPACE)
        if self._is_bare and not text:
            return False
        self._step = self._read_text
        if self._is_bare and text.startswith("{"):
            self._defer(len(self._text) - len(text))
            self._step = self._open_call
        return True

    def _read_text(self) -> bool:
        if not self._begin:
            self._show(self._text)
            self._text = ""
            return False
        text, marker, _ = self._text.partition(self._begin)
        if marker:
            shown = text.rstrip(_SPACE)
            self._show(shown)
            self._text = self._text[len(shown) :]
            self._defer(len(text) - len(shown) + len(marker))
            self._step = self._open_list if self._format.is_list else self._open_call
            return True
        held = _end_of_certain(self._text, self._begin)
        self._show(self._text[:held])
        self._text = self._text[held:]
        return False

    # Calls

    def _open_list(self) -> bool:
        length = self._starts_with("[")
        if length is None:
            return False
        self._defer(length)
        self._in_list = True
        return self._go_on(self._open_call) if length else self._reject()

    def _open_call(self) -> bool:
        self._defer(len(self._text) - len(self._text.lstrip(_SPACE)))
        if not self._text:
            return False
        if self._format.arguments_marker:
            return self._go_on(self._read_name)
        self._end_of_value = _EndOfValue()
        return self._go_on(self._read_call) if self._text[0] == "{" else self._reject()

    def _read_name(self) -> bool:
        """Reads `name[ARGS]{` up to the brace."""
        found = BARE_NAME.match(self._text)
        if found is None:
            return self._reject()
        name, rest, marker = found[0], self._text[found.end() :], self._format.arguments_marker
        arguments = rest.removeprefix(marker).lstrip(_SPACE)
        if rest.startswith(marker) and arguments:
            if arguments[0] != "{":
                return self._reject()
            return self._start_call(name, len(self._text) - len(arguments))
        may_go_on = rest.startswith(marker) or marker.startswith(rest)
        return False if may_go_on else self._reject()

    def _read_call(self) -> bool:
        """Reads `{"name": "…", "arguments": {` up to the second brace, or a whole object that has
        these keys in another order or form."""
        if head := self._head.match(self._text):
            name = _loads(head[1])
            return self._start_call(name, head.end()) if name else self._reject()
        if _NO_OBJECT.match(self._text):
            return self._reject()
        end = self._end_of_value.find(self._text)
        if end is None:
            return False
        call = _parsed_call(self._text[:end], self._format.arguments_key)
        if call is None:
            return self._reject()
        name, arguments = call
        self._start_call(name, end)
        self._show_arguments(arguments)
        return self._go_on(self._close_call)

    def _start_call(self, name: str, start: int) -> bool:
        """`start` is the index of the first character of the arguments."""
        self._events.append(ToolCallStart(self._calls, name))
        self._calls += 1
        self._undecided = ""
        self._text = self._text[start:]
        self._end_of_value = _EndOfValue()
        return self._go_on(self._read_arguments)

    def _read_arguments(self) -> bool:
        end = self._end_of_value.find(self._text)
        self._show_arguments(self._text[:end])
        self._text = "" if end is None else self._text[end:]
        self._end_of_value.forget_text()
        if end is None:
            return False
        return self._go_on(
            self._close_call if self._format.arguments_marker else self._close_object
        )

    # After the arguments. If the answer ends here, the missing end of the call is no error.

    def _close_object(self) -> bool:
        return self._expect("}", self._close_call)

    def _close_call(self) -> bool:
        if not self._in_list:
            return self._go_on(self._close)
        if (is_next := self._next_call(",")) is not False:
            return bool(is_next)
        return self._expect("]", self._close)

    def _close(self) -> bool:
        self._in_list = False
        end = self._format.end
        return self._expect(end, self._pause) if end else self._go_on(self._pause)

    def _pause(self) -> bool:
        """After a call: the next call or text follows."""
        if (
            self._is_bare
            and (is_next := self._next_call(self._format.separator.strip())) is not False
        ):
            return bool(is_next)
        self._text = self._text.lstrip(_SPACE)
        return self._go_on(self._read_text) if self._text else False

    def _next_call(self, separator: str) -> bool | None:
        """Goes on to a call without a marker if one follows; None: more text is needed."""
        text = self._text.lstrip(_SPACE).removeprefix(separator).lstrip(_SPACE)
        if not text:
            return None
        if not text.startswith("{"):
            return False
        self._defer(len(self._text) - len(text))
        return self._go_on(self._open_call)

    # Parts of steps

    def _go_on(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _reject(self) -> bool:
        """The text is not a call."""
        self._show(self._undecided)
        self._undecided = ""
        self._in_list = False
        return self._go_on(self._read_text)

    def _defer(self, length: int) -> None:
        self._undecided += self._text[:length]
        self._text = self._text[length:]

    def _starts_with(self, marker: str) -> int | None:
        """The length of whitespace and marker, 0 for other text; None: more text is needed."""
        text = self._text.lstrip(_SPACE)
        if text.startswith(marker):
            return len(self._text) - len(text) + len(marker)
        return None if marker.startswith(text) else 0

    def _expect(self, marker: str, then: Callable[[], bool]) -> bool:
        """Skips the marker; any other text is part of the answer."""
        length = self._starts_with(marker)
        if length is None:
            return False
        self._text = self._text[length:]
        self._in_list = self._in_list and length > 0
        return self._go_on(then if length else self._read_text)

    def _show(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _show_reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def _show_arguments(self, text: str) -> None:
        self._events.append(ToolCallArguments(self._calls - 1, text))


class _EndOfValue:
    """Finds the end of the JSON object or list that starts with the first character."""

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The index after the value in `text`, None if it is not closed; scans new text only."""
        for place in range(self._seen, len(text)):
            if self._ends_with(text[place]):
                return place + 1
        self._seen = len(text)
        return None

    def forget_text(self) -> None:
        """The caller drops the scanned text: the next text follows it."""
        self._seen = 0

    def _ends_with(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth == 0


def _end_of_certain(text: str, marker: str) -> int:
    """The length of `text` without whitespace and a prefix of the marker at its end."""
    longest = min(len(text), len(marker) - 1)
    part = next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
    return len(text[: len(text) - part].rstrip(_SPACE))


def _loads(text: str) -> Any:
    """The value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parsed_call(text: str, arguments_key: str) -> tuple[str, str] | None:
    """The name and arguments of a whole call; None if it is not one."""
    call = _loads(text)
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get(arguments_key)
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
