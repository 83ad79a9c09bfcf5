"""One vector for a text: which hidden state stands for it, and what becomes of that."""

import json
import math
import sys
from array import array
from pathlib import Path
from typing import Any

from text_generation_router.request import Pooling

# Where sentence-transformers keeps it, beside the model.
_SETTINGS = Path("1_Pooling", "config.json")


def pooling_of(directory: Path, asked: str | None) -> Pooling:
    """How the model's prompts are pooled: as it was asked for, else as the model's folder says, as
    sentence-transformers writes it, else the last token, which has seen all the others.

    Raises ValueError, one sentence, where the folder says what is not supported.
    """
    if asked is not None:
        return Pooling(asked)
    path = directory / _SETTINGS
    if not path.is_file():
        return Pooling.LAST
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        modes = _modes(settings)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} can not be read as the settings of a pooling: {error}; choose one with "
            "--pooling last or --pooling mean"
        ) from error
    known = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN, "mean": Pooling.MEAN}
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(
            f"{path} asks for the pooling {' and '.join(modes) or 'none'}; last token and mean are "
            "supported: choose one with --pooling last or --pooling mean"
        )
    return known[modes[0]]


def _modes(settings: dict[str, Any]) -> list[str]:
    """The modes that are on, without their prefix; newer files name one as `pooling_mode`."""
    if isinstance(mode := settings.get("pooling_mode"), str):
        return [mode]
    prefix = "pooling_mode_"
    return [
        name.removeprefix(prefix)
        for name, is_on in settings.items()
        if name.startswith(prefix) and is_on is True
    ]


def vector_of(pooled: bytes, dimensions: int | None, is_normalised: bool) -> "array[float]":
    """The vector of a `PrefillOutput.pooled` in float32: its first `dimensions`, or all, of length
    1 if it is to be normalised."""
    vector = array("f", pooled)
    if sys.byteorder == "big":
        vector.byteswap()
    if dimensions is not None:
        vector = vector[:dimensions]
    if is_normalised and (length := math.hypot(*vector)) > 0:
        vector = array("f", [value / length for value in vector])
    return vector


def little_endian(vector: "array[float]") -> bytes:
    """Its bytes, as they are sent in base64."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector.tobytes()
