"""Reads the text and JSON files of a model's directory."""

import json
from pathlib import Path
from typing import Any


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
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
