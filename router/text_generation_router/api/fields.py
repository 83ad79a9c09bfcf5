"""Kinds of fields that the bodies of several dialects have, beside `fields.py` of the router."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, Field

TEMPERATURE = (
    "Above 1 the choice of tokens is more random, below 1 less. 0: always the "
    "likeliest token. Default: 1."
)
TOP_P = "Draw only from the likeliest tokens whose probabilities add up to this, 0 to 1."
TYPICAL_P = "Draw only from the most typical tokens whose probabilities add up to this, 0 to 1."
REPETITION_PENALTY = "Above 1, tokens that were used are less likely to come again. 1: no penalty."
DETERMINISTIC = (
    "The same tokens, bit for bit, regardless of what else is in the batch. Refused "
    "where the server can not promise it."
)
STREAM = "Answer with a stream of events."
# Names in one `warning` header, which stays short.
_MOST_NAMES = 32


class Hint:
    """Marks a field that may have any value and changes nothing."""

    def __init__(self, *harmless: Any) -> None:
        """harmless: values that request what this server does anyway."""
        self.harmless = harmless


IGNORED = Field(description="Accepted, but it changes nothing.")


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


# As of `X-Priority`, whose range leaves room above and below.
_PRIORITIES = {"priority": 50, "flex": -50}

ServiceTier = Annotated[
    Any,
    # Other values are served as `default`, and named in the `warning` header.
    Hint("auto", "default", *_PRIORITIES),
    Field(description="`priority` has its turn before others, `flex` behind them."),
]


def tier_of(asked: Any) -> str:
    """The tier that serves this value of the field."""
    return asked if isinstance(asked, str) and asked in _PRIORITIES else "default"


def priority_of(asked: Any) -> int:
    """The priority of that tier."""
    return _PRIORITIES.get(tier_of(asked), 0)
