"""Lists and objects that are checked in slices: the same answers, the first mistake only."""

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from text_generation_router.bounded import MAX_ITEMS, Entries, Items, Numbers
from text_generation_router.fields import Body

Byte = Annotated[int, Field(ge=0, le=255, strict=True)]


class Thing(Body):
    name: str


def first_of(adapter: TypeAdapter[Any], given: Any) -> tuple[Any, ...]:
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(given)
    (error,) = caught.value.errors()
    return error["loc"], error["type"], error["msg"], error["input"]


@pytest.mark.parametrize("place", [0, 1, 255, 256, 999])
def test_the_mistake_has_its_place(place: int) -> None:
    for kind, right, wrong in ((Numbers[Byte], 7, -1), (Items[Byte], 7, -1)):
        adapter = TypeAdapter(kind)
        given = [right] * 1000
        given[place] = given[999] = wrong
        words = "Input should be greater than or equal to 0"
        assert first_of(adapter, given) == ((place,), "greater_than_equal", words, -1)
    things: list[Any] = [{"name": "{x}"}] * 1000
    things[place] = {"name": 1}
    expected = ((place, "name"), "string_type", "Input should be a valid string", 1)
    assert first_of(TypeAdapter(Items[Thing]), things) == expected
    things[place] = {}
    assert first_of(TypeAdapter(Items[Thing]), things)[:2] == ((place, "name"), "missing")


def test_what_is_right_stays() -> None:
    assert TypeAdapter(Numbers[Byte]).validate_python([1, 2] * 20_000) == [1, 2] * 20_000
    made = TypeAdapter(Items[Thing]).validate_python([{"name": str(i)} for i in range(1000)])
    assert [thing.name for thing in made] == [str(i) for i in range(1000)]
    entries = {str(i): i % 256 for i in range(1000)}
    assert TypeAdapter(Entries[Byte]).validate_python(entries) == entries
    assert TypeAdapter(Numbers[Byte]).json_schema()["items"]["maximum"] == 255


def test_objects() -> None:
    entries: dict[str, Any] = {str(i): 1 for i in range(MAX_ITEMS)}
    entries["700"] = "x"
    loc, kind, *_ = first_of(TypeAdapter(Entries[Byte]), entries)
    assert (loc, kind) == (("700",), "int_type")


def test_too_many() -> None:
    for adapter, given in (
        (TypeAdapter(Items[Byte]), [1] * (MAX_ITEMS + 1)),
        (TypeAdapter(Entries[Byte]), {str(i): 1 for i in range(MAX_ITEMS + 1)}),
    ):
        loc, kind, words, _ = first_of(adapter, given)
        assert (loc, kind) == ((), "too_long")
        assert f"at most {MAX_ITEMS}" in words and str(MAX_ITEMS + 1) in words


def test_as_a_part_of_a_union() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(str | Items[str] | Numbers[Byte])
    assert adapter.validate_python([1] * 1000) == [1] * 1000
    assert adapter.validate_python(["a"] * 1000) == ["a"] * 1000
