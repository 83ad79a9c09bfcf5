"""What a JSON text would take, counted without parsing it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.edge import json_cost

VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text(alphabet='a"\\{[,:-é', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


def parts_of(value: Any) -> tuple[int, int, int, int]:
    """Objects and lists, keys, strings, commas."""
    if isinstance(value, str):
        return 0, 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    keys = len(value) if isinstance(value, dict) else 0
    inner = [parts_of(one) for one in (value.values() if keys else value)]
    own = (1, keys, keys, max(0, len(value) - 1))
    sums = [sum(column) for column in zip(own, *inner, strict=True)]
    return sums[0], sums[1], sums[2], sums[3]


@given(value=VALUES, piece=st.integers(1, 40))
def test_what_is_outside_of_strings_is_counted(value: Any, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    containers, keys, strings, commas = parts_of(value)
    expected = (
        containers * json_cost._CONTAINER
        + keys * json_cost._KEY
        + strings * json_cost._STRING
        + commas * json_cost._PLACE
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_cost, "_PIECE", piece)
        assert json_cost.cost_outside_strings(text) == expected


def test_what_is_refused() -> None:
    assert json_cost.is_too_costly(b"[" + b"{}," * 600_000 + b"{}]")
    assert not json_cost.is_too_costly(b'["' + b"{}," * 600_000 + b'{}"]')
    # Numbers up to 256 are there already, others are objects of their own.
    assert not json_cost.is_too_costly(b"[" + b"104," * 400_000 + b"1]")
    assert not json_cost.is_too_costly(b"[" + b"30000," * 140_000 + b"1]")
    assert json_cost.is_too_costly(b"[" + b"30000," * 300_000 + b"1]")
    # Those that are longer have more room.
    assert not json_cost.is_too_costly(b"[" + b"300000, " * 300_000 + b"1]")
    for number in (b"1", b"300", b"-6", b"1.5", b"1e5"):
        assert json_cost.is_too_costly(b"[" + (number + b",") * 500_000 + b"1]")
    # Small ones may be anything.
    assert not json_cost.is_too_costly(b"[" + b"{}," * 9_000 + b"{}]")
