"""OpenAI's `service_tier`, as a priority."""

from typing import Annotated, Any

from pydantic import Field

from text_generation_router.api.hints import Hint

# As of `X-Priority`, whose range leaves room above and below.
_PRIORITIES = (("priority", 50), ("flex", -50))

ServiceTier = Annotated[
    Any,
    # Other values are served as `default`, and named in the `warning` header.
    Hint("auto", "default", *(name for name, _ in _PRIORITIES)),
    Field(description="`priority` has its turn before others, `flex` behind them."),
]


def tier_of(asked: Any) -> str:
    """The tier that serves this value of the field."""
    return next((name for name, _ in _PRIORITIES if name == asked), "default")


def priority_of(asked: Any) -> int:
    """The priority of that tier."""
    return next((priority for name, priority in _PRIORITIES if name == asked), 0)
