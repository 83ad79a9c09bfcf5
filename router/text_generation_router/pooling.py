"""One vector for a text: which hidden states it is made of, and how it is normalised."""

import math
from array import array
from pathlib import Path
from typing import Any

from text_generation_process.json_file import read_object

from text_generation_router.request import Pooling

# Where sentence-transformers writes it, below the model's directory.
_SETTINGS = Path("1_Pooling", "config.json")


def pooling_of(directory: Path, name: str | None) -> Pooling:
    """How the model's prompts are pooled: as named, else as in the settings of
    sentence-transformers in the model's directory, else the last token, which has seen the others.

    Raises ValueError, one sentence, if these settings are not supported.
    """
    if name is not None:
        return Pooling(name)
    path = directory / _SETTINGS
    if not path.is_file():
        return Pooling.LAST
    try:
        modes = _modes(read_object(path))
    except ValueError as error:
        raise ValueError(f"{error}; or choose --pooling last or --pooling mean") from error
    known = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN, "mean": Pooling.MEAN}
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(
            f"{path} asks for the pooling {' and '.join(modes) or 'none'}; last token and mean are "
            "supported: choose one with --pooling last or --pooling mean"
        )
    return known[modes[0]]


def _modes(settings: dict[str, Any]) -> list[str]:
    """The modes that are on, without their prefix; newer files have one `pooling_mode`."""
    if isinstance(mode := settings.get("pooling_mode"), str):
        return [mode]
    prefix = "pooling_mode_"
    return [
        name.removeprefix(prefix)
        for name, is_on in settings.items()
        if name.startswith(prefix) and is_on is True
    ]


def vector_of(pooled: bytes, dimensions: int | None, is_normalised: bool) -> "array[float]":
    """The vector in the bytes of `PrefillOutput.pooled`, in float32: its first `dimensions`, or
    all, scaled to length 1 if `is_normalised`."""
    vector = array("f", pooled)
    if dimensions is not None:
        vector = vector[:dimensions]
    if is_normalised and (length := math.hypot(*vector)) > 0:
        vector = array("f", [value / length for value in vector])
    return vector
