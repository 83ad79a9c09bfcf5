import pytest
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.shards import CachedBatch, StepResult


@pytest.mark.parametrize(
    ("answered", "left", "is_answer"),
    [
        ([1, 2, 3], (1, 3, 9), True),
        ([3, 2, 1], (9, 3, 1), True),
        # Somebody asked for is missing; somebody answers who was not asked.
        ([2, 3], (1, 3, 9), False),
        ([1, 2, 3, 9], (1, 3, 9), False),
        # Somebody who goes on is gone; somebody who ended, or a stranger, is still there.
        ([1, 2, 3], (1, 3), False),
        ([1, 2, 3], (1, 2, 3, 9), False),
        ([1, 2, 3], (1, 3, 9, 10), False),
        ([1, 2, 3], (), False),
    ],
)
def test_an_answer_is_to_what_was_asked(
    answered: list[int], left: tuple[int, ...], is_answer: bool
) -> None:
    """Asked for 1, 2, 3 while 9 waits; 2 ends."""
    ends = [FinishReason.LENGTH if request_id == 2 else None for request_id in answered]
    batch = CachedBatch(0, left) if left else None
    ones = [1] * len(answered)
    result = StepResult(answered, ones, ones, ends, batch)
    assert result.is_answer_to({1, 2, 3}, {1, 2, 3, 9}) is is_answer


def test_top_tokens_are_cut_by_request() -> None:
    result = StepResult([1, 2, 3], [], [], [], None, [2, 0, 1], [7, 8, 9], [-1.0, -2.0, -3.0])
    assert list(result.top_tokens()) == [([7, 8], [-1.0, -2.0]), ([], []), ([9], [-3.0])]
    assert list(StepResult([1, 2], [], [], [], None).top_tokens()) == [((), ()), ((), ())]
