"""The requests and events of each kind of server, and the fields that a server may refuse."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from text_generation_router.benchmark.load.events import Event, read_openai, read_tgi


@dataclass(frozen=True, slots=True)
class Api:
    """One form of requests and events."""

    path: str
    prompt: Callable[[str], dict[str, Any]]
    """The fields of the body that hold the prompt."""
    read: Callable[[dict[str, Any]], Event]
    is_openai: bool
    ignore_eos: tuple[str, ...]
    """The fields that make the server ignore the end of sequence."""
    optional: tuple[str, ...]
    """The fields to leave out if the server refuses them, in this order."""

    def body(self, prompt: str, output_tokens: int, model: str, ignore_eos: bool) -> dict[str, Any]:
        """The whole body, for a greedy stream."""
        fields: dict[str, Any] = self.prompt(prompt)
        if not self.is_openai:
            # TGI ignores the field; vLLM's own benchmark sends it, too.
            end = {"ignore_eos_token": True} if ignore_eos else {}
            parameters = {"max_new_tokens": output_tokens, "details": True, **end}
            return {**fields, "parameters": parameters}
        fields |= {"model": model, "stream": True, "temperature": 0, "max_tokens": output_tokens}
        fields["stream_options"] = {"include_usage": True}
        if ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": output_tokens}
        return fields


def _messages(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


_IGNORE_EOS = ("min_tokens", "ignore_eos")
_OPTIONAL = (*_IGNORE_EOS, "stream_options", "temperature", "max_tokens")
_OPENAI = (read_openai, True, _IGNORE_EOS, _OPTIONAL)
_TGI = (read_tgi, False, ("ignore_eos_token",), ("ignore_eos_token",))

APIS = {
    "openai-chat": Api("/v1/chat/completions", _messages, *_OPENAI),
    "openai-completions": Api("/v1/completions", lambda prompt: {"prompt": prompt}, *_OPENAI),
    "tgi": Api("/generate_stream", lambda prompt: {"inputs": prompt}, *_TGI),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the form of its requests."""

    name: str
    """The key in APIS."""
    model: str
    ignore_eos: bool
    """Whether the user asks for it."""
    refused: frozenset[str] = frozenset()
    """Fields that the server refuses."""

    @property
    def api(self) -> Api:
        """The form of requests and events."""
        return APIS[self.name]

    @property
    def is_asked_to_ignore_eos(self) -> bool:
        """Whether the requests have a field for it."""
        return self.ignore_eos and not self.refused.issuperset(self.api.ignore_eos)

    def body(self, prompt: str, output_tokens: int) -> bytes:
        """The body as JSON, without the refused fields."""
        body = self.api.body(prompt, output_tokens, self.model, self.ignore_eos)
        fields = body if self.api.is_openai else body["parameters"]
        for name in self.refused:
            value = fields.pop(name, None)
            if name == "max_tokens":
                fields["max_completion_tokens"] = value
        return orjson.dumps(body)
