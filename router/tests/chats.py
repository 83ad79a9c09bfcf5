"""A running router whose model can chat: it reasons in <think> and calls tools as Hermes does."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.tests.serving import EOS_ID, Server, script_of, serve

# Shows every field of a message. The comment mentions reasoning, so that it is detected.
TEMPLATE = (
    "{% if tools %}[{{ tools | map(attribute='function.name') | join(',') }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments.x }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# <think></think> #}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@asynccontextmanager
async def serve_chat(
    directory: Path, text: str, template: str = TEMPLATE, **options: Any
) -> AsyncIterator[Server]:
    """The model answers everything with `text` and ends."""
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    async with serve(directory, text, **options) as server:
        server.shards.script = [*script_of(text), EOS_ID]
        yield server


def named_events(text: str) -> list[dict[str, Any]]:
    """The data of the events of a stream, each of which says its type twice."""
    found = []
    for event in text.strip("\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
