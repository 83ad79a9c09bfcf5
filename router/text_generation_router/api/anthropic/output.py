"""The content of an Anthropic message while it grows: its blocks, and the events about them."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import orjson

from text_generation_router.api.ids import make_id
from text_generation_router.chat.parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

Json = dict[str, Any]

# Clients drop thinking without a signature from the history. In base64, as Anthropic's are.
_SIGNATURE = b64encode(b"not signed: this server does not check thinking").decode()


class ContentWriter:
    """Owns the blocks of one message, at most the last of them open.

    The events spell what the blocks are in the end, so a streamed answer equals a whole one.
    """

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self._pieces: list[str] = []
        self._is_open = False

    def feed(self, event: ChatEvent) -> Iterator[Json]:
        """The events of the next piece."""
        match event:
            case ContentDelta(text):
                yield from self._open_text({"type": "text", "text": ""})
                yield self._piece(text, {"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                yield from self._open_text({"type": "thinking", "thinking": "", "signature": ""})
                yield self._piece(text, {"type": "thinking_delta", "thinking": text})
            case ToolCallStart(_, name):
                use = {"type": "tool_use", "id": make_id("toolu"), "name": name, "input": {}}
                yield from self._open(use)
            case ToolCallArguments(_, text):
                yield self._piece(text, {"type": "input_json_delta", "partial_json": text})

    def finish(self) -> Iterator[Json]:
        """The events of the end of the last block."""
        if not self._is_open:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        if block["type"] == "tool_use":
            block = {**block, "input": _object(text)}
        else:
            block = {**block, block["type"]: text}
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self.blocks[-1] = block
        self._pieces.clear()
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _open_text(self, block: Json) -> Iterator[Json]:
        if not self._is_open or self.blocks[-1]["type"] != block["type"]:
            yield from self._open(block)

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self.finish()
        self.blocks.append(block)
        self._is_open = True
        index = len(self.blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _piece(self, text: str, delta: Json) -> Json:
        self._pieces.append(text)
        return self._delta(delta)

    def _delta(self, delta: Json) -> Json:
        index = len(self.blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}


def _object(arguments: str) -> Any:
    """The arguments as an object; {} for a call that was cut off, whose `stop_reason` says so."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
