"""Lists and objects of request bodies: validated in slices, up to the first mistake.

pydantic alone validates a list in one call, in which no other thread runs, and reports every wrong
item, which takes a multiple of its size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticCustomError,
    PydanticKnownError,
    core_schema,
)

# No real request has more messages, tools, stop strings or biases.
MAX_ITEMS = 4096
_SLICE = 256
# Numbers are validated faster than objects.
_NUMBERS_SLICE = 16 * 1024

Item = TypeVar("Item")
Check = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Checked:
    """Stands behind a list or an object, whose check `by` calls for parts of it.

    In place of `FailFast` and `WrapValidator`, of which one can not be a part of a union.
    """

    by: Callable[[Any, Check], Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema = {**schema, "fail_fast": True}
        return core_schema.no_info_wrap_validator_function(self.by, schema)


def _in_slices(given: Any, check: Check) -> Any:
    if type(given) is not list or len(given) <= _SLICE:
        return check(given)
    _refuse_too_many("List", given)
    made: list[Any] = []
    for start in range(0, len(given), _SLICE):
        made += _checked(given[start : start + _SLICE], start, check)
    return made


def _numbers_in_slices(given: Any, check: Check) -> Any:
    if type(given) is not list or len(given) <= _SLICE:
        return check(given)
    for start in range(0, len(given), _NUMBERS_SLICE):
        _checked(given[start : start + _NUMBERS_SLICE], start, check)
    # Numbers stay what they are.
    return given


def _object_in_slices(given: Any, check: Check) -> Any:
    if type(given) is not dict or len(given) <= _SLICE:
        return check(given)
    _refuse_too_many("Dictionary", given)
    made: dict[str, Any] = {}
    entries = iter(given.items())
    while some := dict(islice(entries, _SLICE)):
        made |= check(some)
    return made


def _checked(some: list[Any], start: int, check: Check) -> list[Any]:
    """The items of a slice. An error has the item's place in the whole list."""
    try:
        checked: list[Any] = check(some)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        place, *inner = first["loc"]
        assert isinstance(place, int)
        # The library fills what is in braces.
        words = PydanticCustomError(first["type"], "{sentence}", {"sentence": first["msg"]})
        raise ValidationError.from_exception_data(
            error.title,
            [InitErrorDetails(type=words, loc=(place + start, *inner), input=first["input"])],
        ) from None
    return checked


def _refuse_too_many(kind: str, given: list[Any] | dict[str, Any]) -> None:
    if len(given) > MAX_ITEMS:
        raise PydanticKnownError(
            "too_long",
            {"field_type": kind, "max_length": MAX_ITEMS, "actual_length": len(given)},
        )


IN_SLICES = _Checked(_in_slices)
"""For a list with another constraint; see `Items`."""

Items = Annotated[list[Item], IN_SLICES]
"""A list of at most `MAX_ITEMS`."""

Numbers = Annotated[list[Item], _Checked(_numbers_in_slices)]
"""A list of numbers, as many as there are."""

Entries = Annotated[dict[str, Item], _Checked(_object_in_slices)]
"""An object of at most `MAX_ITEMS` keys."""
