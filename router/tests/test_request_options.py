"""How much one API key may ask for, and when it is worth coming again."""

import pytest
from text_generation_router.errors import KeyLimitError, ValidationError
from text_generation_router.request_options import Allowance, KeyLimits
from text_generation_router.scheduler.costs import MAX_ENDINGS, EndingRate


def refusal(allowance: Allowance, num: int, now: float) -> KeyLimitError:
    """Asserts that nothing changes when it refuses."""
    running = allowance.num_running
    with pytest.raises(KeyLimitError) as caught:
        allowance.enter(num, now)
    assert allowance.num_running == running
    assert "\n" not in caught.value.message and caught.value.status_code == 429
    return caught.value


def test_without_limits_there_are_none() -> None:
    allowance = Allowance(KeyLimits())
    for now in range(1000):
        allowance.enter(100, now)
        allowance.take(10**9, now)


def test_places_come_back() -> None:
    allowance = Allowance(KeyLimits(max_concurrent_requests=3))
    allowance.enter(2, 0)
    error = refusal(allowance, 2, 0)
    assert (error.reason, error.retry_after_s) == ("requests", 1)
    assert "2 of at most 3" in error.message
    allowance.enter(1, 0)
    assert refusal(allowance, 1, 0).reason == "requests"
    allowance.leave(2)
    allowance.enter(2, 0)


def test_more_than_can_ever_be_is_no_matter_of_time() -> None:
    with pytest.raises(ValidationError, match=r"has 4 sequences; an API key .* at most 3"):
        Allowance(KeyLimits(max_concurrent_requests=3)).enter(4, 0)


def test_a_minutes_tokens_are_there_at_the_start_and_no_more_later() -> None:
    allowance = Allowance(KeyLimits(max_tokens_per_minute=60))
    allowance.enter(1, 1e6)
    allowance.take(60, 1e6)
    assert refusal(allowance, 1, 1e6).reason == "tokens"
    allowance.enter(1, 1e6 + 1)
    # An hour fills no more than the bucket.
    allowance.take(60, 1e6 + 3600)
    refusal(allowance, 1, 1e6 + 3600)


@pytest.mark.parametrize(
    ("most", "used", "wait_s"), [(60, 60, 1), (60, 90, 31), (60, 659, 600), (1, 1, 1), (7, 8, 9)]
)
def test_a_caller_that_waits_as_told_is_let_in(most: int, used: int, wait_s: int) -> None:
    allowance = Allowance(KeyLimits(max_tokens_per_minute=most))
    allowance.take(used, 50)
    error = refusal(allowance, 1, 50)
    assert error.retry_after_s == wait_s and f"try again in {wait_s} s" in error.message
    if wait_s > 1:
        refusal(allowance, 1, 50 + wait_s - 1.5)
    allowance.enter(1, 50 + wait_s)


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
