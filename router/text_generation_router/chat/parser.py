"""Reads reasoning, text and tool calls from an answer while it is being written."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from text_generation_router.chat.format import BARE_NAME, ChatFormat

# JSON's whitespace; other spaces are text.
_SPACE = " \t\r\n"
# An object that can not be JSON, whatever follows.
_NO_OBJECT = re.compile(r'\{[ \t\r\n]*[^ \t\r\n"}]')


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the text that the model writes for itself, before its answer."""

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

    However the text is cut into pieces, the events, with neighbours of one kind joined, are the
    same: every step decides on a beginning of the text that no continuation can change. Text that
    looks like a call and turns out not to be one is content, markers included; once a call's name
    and the beginning of its arguments are there, it is a call, even if its arguments never end.
    Whitespace around markers belongs to them. Nothing else is left out.
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
        # Text that no step has taken yet, and text of a call that may still turn out to be none.
        self._text = ""
        self._doubtful = ""
        self._calls = 0
        self._in_list = False
        self._end_of_value = _EndOfValue()
        self._events: list[ChatEvent] = []
        self.has_reasoned = starts_in_reasoning
        """Whether reasoning has begun; it comes first or never."""
        # The steps that hold nothing back but whitespace and parts of markers.
        self._skipping: tuple[Callable[[], bool], ...] = (
            self._skip_to_reasoning,
            self._skip_to_answer,
            self._close_object,
            self._close_call,
            self._close,
            self._pause,
        )
        # Each step takes what it can from the text, and says whether there may be more to do.
        self._step: Callable[[], bool] = self._skip_to_reasoning
        if not starts_in_reasoning:
            self._step = self._start if chat_format.reasoning else self._start_answer

    def feed(self, text: str) -> list[ChatEvent]:
        """The events that became certain with the next piece of text."""
        self._text += text
        while self._text and self._step():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ChatEvent]:
        """What was held back: the answer ends here."""
        rest = self._doubtful + self._text
        if self._step == self._reason:
            self._show_reasoning(rest)
        elif self._step not in self._skipping:
            self._show(rest)
        events, self._events = self._events, []
        self._text = self._doubtful = ""
        return events

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._step in (self._skip_to_reasoning, self._reason)

    # Reasoning

    def _start(self) -> bool:
        """At the first character, where reasoning may begin."""
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
        """Where a `{` begins a call, if the format has calls without a marker."""
        text = self._text.lstrip(_SPACE)
        if self._is_bare and not text:
            return False
        self._step = self._tell
        if self._is_bare and text.startswith("{"):
            self._take_doubtful(len(self._text) - len(text))
            self._step = self._open_call
        return True

    def _tell(self) -> bool:
        if not self._begin:
            self._show(self._text)
            self._text = ""
            return False
        text, marker, _ = self._text.partition(self._begin)
        if marker:
            shown = text.rstrip(_SPACE)
            self._show(shown)
            self._text = self._text[len(shown) :]
            self._take_doubtful(len(text) - len(shown) + len(marker))
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
        self._take_doubtful(length)
        self._in_list = True
        return self._go_on(self._open_call) if length else self._reject()

    def _open_call(self) -> bool:
        self._take_doubtful(len(self._text) - len(self._text.lstrip(_SPACE)))
        if not self._text:
            return False
        if self._format.arguments_marker:
            return self._go_on(self._read_name)
        self._end_of_value = _EndOfValue()
        return self._go_on(self._read_call) if self._text[0] == "{" else self._reject()

    def _read_name(self) -> bool:
        """`name[ARGS]{`, up to the brace."""
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
        """`{"name": "…", "arguments": {`, up to the second brace, or an object that holds them in
        another way, up to its end."""
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
        """The name is known, and at `start` the arguments begin."""
        self._events.append(ToolCallStart(self._calls, name))
        self._calls += 1
        self._doubtful = ""
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

    # Behind the arguments. What is left of a call is no text, if the answer ends too early for it.

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
        """Between a call and the next, or text."""
        if (
            self._is_bare
            and (is_next := self._next_call(self._format.separator.strip())) is not False
        ):
            return bool(is_next)
        self._text = self._text.lstrip(_SPACE)
        return self._go_on(self._tell) if self._text else False

    def _next_call(self, separator: str) -> bool | None:
        """Goes on to a call without a marker if one follows; None: more text is needed to see."""
        text = self._text.lstrip(_SPACE).removeprefix(separator).lstrip(_SPACE)
        if not text:
            return None
        if not text.startswith("{"):
            return False
        self._take_doubtful(len(self._text) - len(text))
        return self._go_on(self._open_call)

    # What the steps are made of

    def _go_on(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _reject(self) -> bool:
        """It was no call."""
        self._show(self._doubtful)
        self._doubtful = ""
        self._in_list = False
        return self._go_on(self._tell)

    def _take_doubtful(self, length: int) -> None:
        self._doubtful += self._text[:length]
        self._text = self._text[length:]

    def _starts_with(self, marker: str) -> int | None:
        """How long whitespace and the marker are, 0 for other text; None: more text is needed."""
        text = self._text.lstrip(_SPACE)
        if text.startswith(marker):
            return len(self._text) - len(text) + len(marker)
        return None if marker.startswith(text) else 0

    def _expect(self, marker: str, then: Callable[[], bool]) -> bool:
        """Skips the marker; if there is other text, it is the answer's."""
        length = self._starts_with(marker)
        if length is None:
            return False
        self._text = self._text[length:]
        self._in_list = self._in_list and length > 0
        return self._go_on(then if length else self._tell)

    def _show(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _show_reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def _show_arguments(self, text: str) -> None:
        self._events.append(ToolCallArguments(self._calls - 1, text))


class _EndOfValue:
    """Finds where a JSON object or list ends that begins with the first character it sees."""

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The place behind the value in `text`, of which only new characters are looked at."""
        for place in range(self._seen, len(text)):
            if self._ends_with(text[place]):
                return place + 1
        self._seen = len(text)
        return None

    def forget_text(self) -> None:
        """What was seen is gone: the next text follows it."""
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
    """Where the end of `text` begins that may belong to a marker: whitespace and its first part."""
    longest = min(len(text), len(marker) - 1)
    part = next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
    return len(text[: len(text) - part].rstrip(_SPACE))


def _loads(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parsed_call(text: str, arguments_key: str) -> tuple[str, str] | None:
    """The name and arguments of a whole call; None if it is none."""
    call = _loads(text)
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get(arguments_key)
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
