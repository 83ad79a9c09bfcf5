"""The chat templates of a model: where they are found, and their texts. They run in workers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class ChatTemplate:
    """The texts of one model's templates; never changes."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` has a template `default`, `tool_use` or both, and any others by their names;
        `special_tokens` are variables of the templates, as `bos_token`."""
        self.sources = {name: _text(source) for name, source in sources.items()}
        self.special_tokens = {name: _text(token) for name, token in special_tokens.items()}
        self.source = self.sources.get(_DEFAULT) or next(iter(self.sources.values()))
        """The text of the template that is taken where nothing else is asked for."""
        self.tool_source = self.sources.get(_WITH_TOOLS, self.source)
        """The text of the template that is taken where there are tools."""

    @classmethod
    def load(
        cls,
        directory: Path,
        tokenizer_config_path: Path | None,
        bos_token: str | None,
        eos_token: str | None,
    ) -> "ChatTemplate | None":
        """Reads the model's templates; None if it has none.

        A `tokenizer_config_path` is read in place of the model's own files; it is like a
        tokenizer_config.json, or a template if it ends in `.jinja`. Raises ValueError, one
        sentence, for a file that can not be read; a template that is not valid Jinja is told to
        those who render it.
        """
        sources: dict[str, str] = {}
        config: dict[str, Any] = {}
        if tokenizer_config_path is None:
            config = _read_object(directory / "tokenizer_config.json")
            sources = _read_sources(directory, config)
        elif tokenizer_config_path.suffix == ".jinja":
            sources = {_DEFAULT: _read_text(tokenizer_config_path)}
            config = _read_object(directory / "tokenizer_config.json")
        elif not tokenizer_config_path.is_file():
            raise ValueError(
                f"The file {tokenizer_config_path} of --tokenizer-config-path does not exist; give "
                "a tokenizer_config.json or a .jinja file."
            )
        else:
            config = _read_object(tokenizer_config_path)
            sources = _named(config.get("chat_template"), tokenizer_config_path)
        given = {"bos_token": bos_token, "eos_token": eos_token}
        special_tokens = {name: text for name, text in given.items() if text is not None}
        special_tokens |= _special_tokens(config)
        return cls(sources, special_tokens) if sources else None


def _read_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates in a model's directory, by name."""
    own_file = directory / "chat_template.jinja"
    old_file = directory / "chat_template.json"
    if own_file.is_file():
        sources = {_DEFAULT: _read_text(own_file)}
    elif old_file.is_file():
        sources = _named(_read_object(old_file).get("chat_template"), old_file)
    else:
        sources = _named(config.get("chat_template"), directory / "tokenizer_config.json")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_text(path)
    return sources


def _named(template: Any, path: Path) -> dict[str, str]:
    """The `chat_template` field of a file: a text, a list of named texts, or texts by name."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {_DEFAULT: template}
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


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a tokenizer_config.json names, by their names."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The chat template {path} can not be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _text(characters: str) -> str:
    """Without halves of surrogate pairs, which JSON can spell and no tokenizer takes."""
    return characters.encode(errors="replace").decode()
