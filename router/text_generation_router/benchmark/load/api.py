"""How each kind of server is asked for a stream, and what it may refuse of it."""

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
    """The part of the body that is the prompt."""
    read: Callable[[dict[str, Any]], Event]
    is_openai: bool
    ignore_eos: tuple[str, ...]
    """The fields that ask for no end before the last token."""
    optional: tuple[str, ...]
    """Fields that a server may refuse, and is then asked without; in this order."""

    def body(self, prompt: str, output_tokens: int, model: str, ignore_eos: bool) -> dict[str, Any]:
        """The whole body; greedy, streamed."""
        fields: dict[str, Any] = self.prompt(prompt)
        if not self.is_openai:
            # TGI has no such field and ignores it; vLLM's own benchmark sends it, too.
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

APIS = {
    "openai-chat": Api(
        "/v1/chat/completions", _messages, read_openai, True, _IGNORE_EOS, _OPTIONAL
    ),
    "openai-completions": Api(
        "/v1/completions",
        lambda prompt: {"prompt": prompt},
        read_openai,
        True,
        _IGNORE_EOS,
        _OPTIONAL,
    ),
    "tgi": Api(
        "/generate_stream",
        lambda prompt: {"inputs": prompt},
        read_tgi,
        False,
        ("ignore_eos_token",),
        ("ignore_eos_token",),
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as it is asked."""

    name: str
    """Of the form, in APIS."""
    model: str
    ignore_eos: bool
    """Whether the user wants it."""
    refused: frozenset[str] = frozenset()
    """Fields it does not take."""

    @property
    def api(self) -> Api:
        """The form."""
        return APIS[self.name]

    @property
    def is_asked_to_ignore_eos(self) -> bool:
        """Whether any field that asks for it is sent."""
        return self.ignore_eos and not self.refused.issuperset(self.api.ignore_eos)

    def body(self, prompt: str, output_tokens: int) -> bytes:
        """What is posted."""
        body = self.api.body(prompt, output_tokens, self.model, self.ignore_eos)
        fields = body if self.api.is_openai else body["parameters"]
        for name in self.refused:
            value = fields.pop(name, None)
            if name == "max_tokens":
                fields["max_completion_tokens"] = value
        return orjson.dumps(body)
