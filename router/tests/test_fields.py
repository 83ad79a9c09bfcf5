"""Lists and objects of bodies: bounded in number, and validated up to the first mistake."""

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from text_generation_router.fields import MAX_ITEMS, Entries, Items, Numbers

Byte = Annotated[int, Field(ge=0, le=255, strict=True)]


def first_of(kind: Any, given: Any) -> tuple[Any, ...]:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given)
    (error,) = caught.value.errors()
    return error["loc"], error["type"], error["msg"]


@pytest.mark.parametrize("kind", [Numbers[Byte], Items[Byte]])
def test_the_first_mistake_is_reported(kind: Any) -> None:
    given = [7] * 1000
    given[700] = given[999] = -1
    words = "Input should be greater than or equal to 0"
    assert first_of(kind, given) == ((700,), "greater_than_equal", words)
    assert TypeAdapter(kind).json_schema()["items"]["maximum"] == 255
    assert "maxItems" not in TypeAdapter(kind).json_schema()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Items[Byte], ["x"] * (MAX_ITEMS + 1)),
        (Entries[Byte], {str(i): 1 for i in range(MAX_ITEMS + 1)}),
    ],
)
def test_too_many_items_are_refused_unread(kind: Any, given: Any) -> None:
    loc, error, words = first_of(kind, given)
    assert (loc, error) == ((), "too_long")
    assert f"at most {MAX_ITEMS}" in words and str(MAX_ITEMS + 1) in words


def test_parts_of_a_union() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(str | Items[str] | Numbers[Byte] | Entries[Byte])
    for given in ([1] * 5000, ["a"] * 1000, {str(i): 1 for i in range(MAX_ITEMS)}):
        assert adapter.validate_python(given) == given
