"""Finds and reads the chat templates of a model. `TemplateWorkers` render them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text_generation_process.json_file import content_of, read_object, read_settings, read_text

MAX_BYTES = 2**30
"""Memory for one rendering: prompts of millions of characters fit many times."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates."""


class ChatTemplate:
    """The texts of one model's templates. Immutable."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` are templates by name, `default`, `tool_use` or both among them;
        `special_tokens` are variables of the templates, such as `bos_token`."""
        self.sources = {name: _text(source) for name, source in sources.items()}
        self.special_tokens = {name: _text(token) for name, token in special_tokens.items()}
        self.source = self.sources.get(DEFAULT) or next(iter(self.sources.values()))
        """The default template."""
        self.tool_source = self.sources.get(WITH_TOOLS, self.source)
        """The default template of a chat with tools."""

    @classmethod
    def load(cls, directory: Path, tokenizer_config_path: Path | None) -> "ChatTemplate | None":
        """Reads the model's templates; None if it has none.

        A `tokenizer_config_path` replaces the model's own files: a file like
        tokenizer_config.json, or a template if its name ends in `.jinja`. Raises ValueError, one
        sentence, for a file that can not be read. Invalid Jinja is an error of the rendering.
        """
        config = read_settings(directory)
        if tokenizer_config_path is None:
            sources = _read_sources(directory, config)
        elif tokenizer_config_path.suffix == ".jinja":
            sources = {DEFAULT: read_text(tokenizer_config_path)}
        elif tokenizer_config_path.is_file():
            given = read_object(tokenizer_config_path)
            sources = _named(given.get("chat_template"), tokenizer_config_path)
            config |= given
        else:
            raise ValueError(
                f"The file {tokenizer_config_path} of --tokenizer-config-path does not exist; give "
                "a tokenizer_config.json or a .jinja file."
            )
        # A template without text is none: its prompts would be empty.
        sources = {name: source for name, source in sources.items() if source.strip()}
        tokens = {name: content_of(it) for name, it in config.items() if name.endswith("_token")}
        special_tokens = {name: text for name, text in tokens.items() if text is not None}
        return cls(sources, special_tokens) if sources else None


def _read_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates in a model's directory, by name."""
    own_file = directory / "chat_template.jinja"
    old_file = directory / "chat_template.json"
    if own_file.is_file():
        sources = {DEFAULT: read_text(own_file)}
    elif old_file.is_file():
        sources = _named(read_object(old_file).get("chat_template"), old_file)
    else:
        sources = _named(config.get("chat_template"), directory / "tokenizer_config.json")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path)
    return sources


def _named(template: Any, path: Path) -> dict[str, str]:
    """The templates in a `chat_template` field: a text, a list of objects, or an object."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {DEFAULT: template}
    if isinstance(template, list) and all(isinstance(item, dict) for item in template):
        template = {item.get("name"): item.get("template") for item in template}
    if isinstance(template, dict) and all(
        isinstance(part, str) for item in template.items() for part in item
    ):
        return template
    raise ValueError(
        f"The chat_template in {path} must be a text or a list of objects with `name` and "
        "`template`."
    )


def _text(characters: str) -> str:
    """Without lone surrogates, which JSON can spell and no tokenizer accepts."""
    return characters.encode(errors="replace").decode()
