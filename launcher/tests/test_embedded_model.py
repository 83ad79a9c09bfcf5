"""The committed checkpoint, and the form of the texts it was trained on."""

import json

import jinja2
from text_generation_launcher.config import EMBEDDED_MODEL_PATH

from embedded_model.dialogue import chat_exchange


def test_checkpoint_is_small() -> None:
    files = EMBEDDED_MODEL_PATH.rglob("*")
    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_exchange_is_what_the_chat_template_renders() -> None:
    config = json.loads((EMBEDDED_MODEL_PATH / "tokenizer_config.json").read_text("utf-8"))
    exchange = chat_exchange("What?", "dedent(text)\n\nRemoves spaces.")
    given = {"messages": [{"role": "user", "content": "What?"}], "add_generation_prompt": True}
    assert exchange.prompt == jinja2.Template(config["chat_template"]).render(given)
    assert exchange.completion == "dedent(text)\n\nRemoves spaces.<|im_end|>"
