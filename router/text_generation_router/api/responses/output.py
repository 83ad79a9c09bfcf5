"""The growing output of a response: its items, their events, and the texts inside their fields: the
input of a custom tool, and `encrypted_content`."""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_router.api.answers import make_id
from text_generation_router.api.responses.tools import ServedTool
from text_generation_router.chat.parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an item, its text and its events are called."""

    item_type: str
    id_prefix: str
    event: str
    field: str = "text"
    item_fields: Json | None = None
    part_fields: Json | None = None
    """Of the part that has the text; None: the item has it itself, and is a call."""


_MESSAGE = _Kind(
    "message",
    "msg",
    "output_text",
    item_fields={"role": "assistant"},
    part_fields={"annotations": [], "logprobs": []},
)
_REASONING = _Kind("reasoning", "rs", "reasoning_text", item_fields={"summary": []}, part_fields={})
_FUNCTION = _Kind("function_call", "fc", "function_call_arguments", "arguments")
_CUSTOM = _Kind("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class OutputWriter:
    """Owns the items of one response, at most the last of them open.

    The events spell what the items are in the end, so a streamed answer equals a whole one. Events
    have no `sequence_number` yet.
    """

    def __init__(
        self, tools: Iterable[ServedTool] = (), has_encrypted_reasoning: bool = False
    ) -> None:
        self.items: list[Json] = []
        self._tools = {tool.spec.name: tool for tool in tools}
        self._has_encrypted_reasoning = has_encrypted_reasoning
        self._open: _Kind | None = None
        # Of a custom tool.
        self._input = InputReader()
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []

    def feed(self, event: ChatEvent, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """The events of the next piece; `logprobs` are those of its tokens, kept for text only."""
        match event:
            case ContentDelta(text):
                yield from self._continue_text(_MESSAGE, text, logprobs)
            case ReasoningDelta(text):
                yield from self._continue_text(_REASONING, text, ())
            case ToolCallStart(_, name):
                yield from self._start_call(name)
            case ToolCallArguments(_, text):
                assert self._open is not None
                if self._open is _CUSTOM:
                    text = self._input.feed(text)
                if text:
                    self._pieces.append(text)
                    yield self._event(self._open, "delta", delta=text)

    def finish(self, is_complete: bool) -> Iterator[Json]:
        """The events of the end; there is a message even where the model wrote nothing."""
        if not self.items:
            yield from self._continue_text(_MESSAGE, "", ())
        yield from self._close("completed" if is_complete else "incomplete")

    def _start_call(self, name: str) -> Iterator[Json]:
        """`name` is what the model calls the tool."""
        yield from self._close("completed")
        tool = self._tools.get(name)
        kind = _CUSTOM if tool is not None and tool.is_custom else _FUNCTION
        item = {"id": make_id(kind.id_prefix), "type": kind.item_type, "call_id": make_id("call")}
        item |= {"name": name if tool is None else tool.name, kind.field: ""}
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        yield self._add(item)
        self._open, self._input = kind, InputReader()

    def _continue_text(self, kind: _Kind, text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        if self._open is not kind:
            yield from self._close("completed")
            item = {"id": make_id(kind.id_prefix), "type": kind.item_type}
            yield self._add({**item, **(kind.item_fields or {}), "content": []})
            self._open = kind
            yield self._part_event("added", _part(kind, "", []))
        if text:
            self._pieces.append(text)
            self._logprobs += logprobs
            more = {"logprobs": list(logprobs)} if kind is _MESSAGE else {}
            yield self._event(kind, "delta", delta=text, **more)

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the open item, if there is one."""
        kind, text = self._open, "".join(self._pieces)
        if kind is not None:
            fields: Json = {kind.field: text}
            more = {"logprobs": self._logprobs} if kind is _MESSAGE else {}
            yield self._event(kind, "done", **fields, **more)
            if kind.part_fields is not None:
                part = _part(kind, text, self._logprobs)
                yield self._part_event("done", part)
                fields = {"content": [part]}
            if kind is _REASONING and self._has_encrypted_reasoning:
                fields["encrypted_content"] = write_encrypted(text)
            self.items[-1] = {**self.items[-1], **fields, "status": status}
            yield self._of_item("done")
        self._open, self._pieces, self._logprobs = None, [], []

    def _add(self, item: Json) -> Json:
        self.items.append({**item, "status": "in_progress"})
        return self._of_item("added")

    def _of_item(self, name: str) -> Json:
        place = {"output_index": len(self.items) - 1, "item": self.items[-1]}
        return {"type": f"response.output_item.{name}", **place}

    def _event(self, kind: _Kind, name: str, **fields: Any) -> Json:
        if kind.part_fields is not None:
            fields = {"content_index": 0, **fields}
        return {"type": f"response.{kind.event}.{name}", **self._place(), **fields}

    def _part_event(self, name: str, part: Json) -> Json:
        told = {"content_index": 0, "part": part}
        return {"type": f"response.content_part.{name}", **self._place(), **told}

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: _Kind, text: str, logprobs: list[Json]) -> Json:
    part = {"type": kind.event, "text": text, **(kind.part_fields or {})}
    return {**part, "logprobs": logprobs} if kind is _MESSAGE else part


_PREFIX = "plain1."
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters. The first half of a pair is read with what follows it: the second half, or not.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})))*",
    re.DOTALL,
)


class InputReader:
    """Reads the text of `{"input": "…"}` while it is written. Owns what is not read yet."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_open = False

    def feed(self, written: str) -> str:
        """The characters that are known now and were not before."""
        self._rest += written
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        known = _CHARACTERS.match(self._rest)
        assert known is not None
        self._rest = self._rest[known.end() :]
        text: str = json.loads(f'"{known[0]}"', strict=False)
        # Half a pair is no character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write_encrypted(text: str) -> str:
    """The field for a reasoning of this text: in base64, and not encrypted.

    Nothing is stored here, and clients with `store: false` keep this field only. There is no secret
    in it: the client has the same text in `content`.
    """
    return _PREFIX + b64encode(text.encode()).decode()


def read_encrypted(field: str) -> str | None:
    """The text of the reasoning; None if another server wrote the field."""
    if not field.startswith(_PREFIX):
        return None
    try:
        return b64decode(field.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return None
