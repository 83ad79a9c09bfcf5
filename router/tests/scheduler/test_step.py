import pytest
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.step import CachedBatch, StepResult


@pytest.mark.parametrize(
    ("answered", "left", "is_answer"),
    [
        ([1, 2, 3], (1, 3, 9), True),
        ([3, 2, 1], (9, 3, 1), True),
        # A request is missing; an unexpected one answers.
        ([2, 3], (1, 3, 9), False),
        ([1, 2, 3, 9], (1, 3, 9), False),
        # A running row is gone; an ended or unknown row is still there.
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
    """Request 1 has two tokens, of which the second has no alternatives."""
    result = StepResult(
        [1, 2],
        [7, 5, 9],
        [-1.0] * 3,
        [None] * 2,
        None,
        token_counts=[2, 1],
        top_token_counts=[2, 0, 1],
        top_token_ids=[7, 8, 9],
        top_token_logprobs=[-1.0, -2.0, -3.0],
    )
    assert list(result.top_tokens()) == [([7, 8], [-1.0, -2.0]), ([], []), ([9], [-3.0])]
    plain = StepResult([1, 2], [7, 8], [-1.0] * 2, [None] * 2, None)
    assert list(plain.top_tokens()) == [((), ()), ((), ())]


@pytest.mark.parametrize(
    ("counts", "num_tokens", "is_answer"),
    [([2, 1], 3, True), ((), 2, True), ((), 3, False), ([2, 1], 2, False), ([2, 0], 2, False)],
)
def test_every_request_has_a_token_and_every_token_a_request(
    counts: list[int], num_tokens: int, is_answer: bool
) -> None:
    tokens, logprobs = [5] * num_tokens, [-1.0] * num_tokens
    batch = CachedBatch(0, (1, 2))
    result = StepResult([1, 2], tokens, logprobs, [None] * 2, batch, counts)
    assert result.is_answer_to({1, 2}, {1, 2}) is is_answer
    assert not StepResult([1, 2], [5] * 2, [-1.0] * 2, [None], batch).is_answer_to({1, 2}, {1, 2})
