"""When it is worth coming again."""

import pytest
from text_generation_router.callers import MAX_ENDINGS, EndingRate


def test_before_the_first_ending_it_is_as_long_again() -> None:
    rate = EndingRate()
    rate.begin(100.0)
    assert rate.retry_after_s(100.0, 1) == 1
    assert rate.retry_after_s(107.2, 1) == 8
    assert rate.retry_after_s(1000.0, 1) == 60


def test_the_pace_of_the_last_endings() -> None:
    rate = EndingRate()
    rate.begin(0.0)
    for second in range(1, 11):
        rate.end(second * 2.0, 1)
    assert rate.retry_after_s(20.0, 1) == 2
    assert rate.retry_after_s(20.0, 8) == 16
    # They make no progress any more.
    assert rate.retry_after_s(50.0, 1) == 5
    assert rate.retry_after_s(90.0, 1) == 60


def test_many_endings_are_fast() -> None:
    rate = EndingRate()
    rate.begin(0.0)
    for _ in range(5):
        rate.end(1000.0, 1000)
    rate.end(1000.5, MAX_ENDINGS // 2)
    assert rate.retry_after_s(1000.5, 1) == 1
    assert rate.retry_after_s(1000.5, MAX_ENDINGS * 10) == 5


@pytest.mark.parametrize("idle_s", [0.5, 3000.0])
def test_idle_time_does_not_count(idle_s: float) -> None:
    rate = EndingRate()
    rate.begin(0.0)
    rate.end(40.0, 1)
    rate.begin(40.0 + idle_s)
    assert rate.retry_after_s(42.0 + idle_s, 1) == 2
