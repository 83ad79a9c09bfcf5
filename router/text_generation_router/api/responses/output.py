"""The growing output of a response: its items, and their events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_router.api.answers import make_id
from text_generation_router.api.responses.fields import InputReader, write_encrypted
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
class _Text:
    """An item that is one text: what the item, its part and its events are called."""

    item_type: str
    id_prefix: str
    part_type: str
    # What the item and the part have besides.
    item_fields: Json
    part_fields: Json


_MESSAGE = _Text(
    "message", "msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []}
)
_REASONING = _Text("reasoning", "rs", "reasoning_text", {"summary": []}, {})


@dataclass(frozen=True, slots=True)
class _Call:
    """An item that is a call: what the item, its text and its events are called."""

    item_type: str
    id_prefix: str
    field: str
    event: str


_FUNCTION = _Call("function_call", "fc", "arguments", "function_call_arguments")
_CUSTOM = _Call("custom_tool_call", "ctc", "input", "custom_tool_call_input")


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
        self._open: _Text | _Call | None = None
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
                assert isinstance(self._open, _Call)
                if self._open is _CUSTOM:
                    text = self._input.feed(text)
                if text:
                    self._pieces.append(text)
                    yield self._event(f"response.{self._open.event}.delta", delta=text)

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

    def _continue_text(self, kind: _Text, text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        if self._open is not kind:
            yield from self._close("completed")
            item = {"id": make_id(kind.id_prefix), "type": kind.item_type}
            yield self._add({**item, **kind.item_fields, "content": []})
            self._open = kind
            yield self._told_of_part("response.content_part.added", part=_part(kind, "", []))
        if text:
            self._pieces.append(text)
            self._logprobs += logprobs
            more = {"logprobs": list(logprobs)} if kind is _MESSAGE else {}
            yield self._told_of_part(f"response.{kind.part_type}.delta", delta=text, **more)

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the open item, if there is one."""
        text = "".join(self._pieces)
        if isinstance(self._open, _Text):
            kind, part = self._open, _part(self._open, text, self._logprobs)
            more = {"logprobs": self._logprobs} if kind is _MESSAGE else {}
            yield self._told_of_part(f"response.{kind.part_type}.done", text=text, **more)
            yield self._told_of_part("response.content_part.done", part=part)
            fields: Json = {"content": [part]}
            if kind is _REASONING and self._has_encrypted_reasoning:
                fields["encrypted_content"] = write_encrypted(text)
            yield self._end_item(status, **fields)
        elif self._open is not None:
            fields = {self._open.field: text}
            yield self._event(f"response.{self._open.event}.done", **fields)
            yield self._end_item(status, **fields)
        self._open, self._pieces, self._logprobs = None, [], []

    def _add(self, item: Json) -> Json:
        self.items.append({**item, "status": "in_progress"})
        return self._of_item("response.output_item.added")

    def _end_item(self, status: str, **fields: Any) -> Json:
        self.items[-1] = {**self.items[-1], **fields, "status": status}
        return self._of_item("response.output_item.done")

    def _of_item(self, name: str) -> Json:
        return {"type": name, "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _event(self, name: str, **fields: Any) -> Json:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": name, **place, **fields}

    def _told_of_part(self, name: str, **fields: Any) -> Json:
        return self._event(name, content_index=0, **fields)


def _part(kind: _Text, text: str, logprobs: list[Json]) -> Json:
    part = {"type": kind.part_type, "text": text, **kind.part_fields}
    return {**part, "logprobs": logprobs} if kind is _MESSAGE else part
