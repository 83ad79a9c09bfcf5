"""The bytes of events and numbers."""

import struct

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.api.answers import event, float32, float32_json, named_events


def test_event() -> None:
    payload = {"index": 1, "text": "a\nb\r\u2028é", "logprob": float("nan")}
    expected = 'data: {"index":1,"text":"a\\nb\\r\u2028é","logprob":null}\n\n'
    assert event(payload) == expected.encode()


def test_named_events() -> None:
    told = named_events([{"type": "a.b", "x": 1}, {"type": "c"}])
    assert told == b'event: a.b\ndata: {"type":"a.b","x":1}\n\nevent: c\ndata: {"type":"c"}\n\n'


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (0.1, 0.1),
        (-1.0, -1.0),
        (0.0, 0.0),
        (-0.33333334, -0.33333334),
        (-1.1920929e-07, -1.1920929e-7),
        (16777216.0, 16777216.0),
        (3.4028235e38, 3.4028235e38),
    ],
)
def test_logprobs_are_the_shortest_that_read_back(value: float, printed: float) -> None:
    (as_float32,) = struct.unpack("<f", struct.pack("<f", value))
    assert float32(as_float32) == printed


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_undefined_logprobs_are_null(value: float | None) -> None:
    assert float32(value) is None


@given(st.floats(width=32) | st.floats(-30, 0, width=32) | st.integers(-99, 99).map(float))
def test_numbers_are_written_as_json_writes_them(value: float) -> None:
    written = float32_json(value)
    assert written == orjson.dumps(float32(value)).decode()
    if written != "null":
        assert struct.pack("<f", float(written)) == struct.pack("<f", value)
    assert float32_json(None) == "null"
