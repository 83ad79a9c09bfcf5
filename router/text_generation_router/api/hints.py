"""Fields without effect here, which do not change the quality of an answer."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, Field


class Hint:
    """Marks a field that may have any value and changes nothing."""

    def __init__(self, *harmless: Any) -> None:
        """harmless: values that request what this server does anyway."""
        self.harmless = harmless


IGNORED = Field(description="Accepted, but it changes nothing.")


_MOST_NAMES = 32


def warning(body: BaseModel, more: Iterable[str] = ()) -> dict[str, str]:
    """The header that names the fields of a request that have no effect, and `more`; empty without
    any."""
    if names := list(dict.fromkeys((*_ignored(body), *more))):
        if len(names) > _MOST_NAMES:
            names[_MOST_NAMES:] = ["and more"]
        return {"warning": f'299 - "changes nothing here: {", ".join(names)}"'}
    return {}


def _ignored(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """The dotted names of the fields without effect."""
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if isinstance(value, BaseModel):
            yield from _ignored(value, f"{prefix}{name}.")
        for mark in field.metadata:
            if isinstance(mark, Hint) and value is not None and value not in mark.harmless:
                yield prefix + name
