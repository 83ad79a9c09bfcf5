"""Text and JSON in files of a model, and lines of JSON that every reader takes as one."""

import json
from pathlib import Path
from typing import Any

_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]


def read_text(path: Path) -> str:
    """The text of a file in UTF-8. Raises ValueError, one sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can not be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_settings(directory: Path) -> dict[str, Any]:
    """The fields of the files beside a model's tokenizer.json. Raises ValueError, one sentence."""
    settings = read_object(directory / "special_tokens_map.json")
    return settings | read_object(directory / "tokenizer_config.json")


def content_of(token: Any) -> str | None:
    """The text of a token that is a string or an object, if any."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def without_line_ends(lines: bytes) -> bytes:
    """The same JSON, with the characters escaped that end lines for `str.splitlines` and for
    clients that read as it does. orjson escapes the others, which are ASCII."""
    if lines.isascii():
        return lines
    for character, escaped in _LINE_ENDS:
        lines = lines.replace(character, escaped)
    return lines
