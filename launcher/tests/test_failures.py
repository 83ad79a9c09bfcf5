"""Which child is named when several have ended."""

import signal

import pytest
from text_generation_launcher.failures import (
    End,
    Kind,
    first_failure,
    grouped,
    kind_of,
    may_follow_another,
)

KILL, SEGV = -signal.SIGKILL, -signal.SIGSEGV
ROUTER = -1


def ends(*given: tuple[int, int, int]) -> list[End]:
    """Ends of three shards and the router, from (rank, exit code, number of the look)."""
    return [
        End(
            f"shard {rank}" if rank != ROUTER else "the router",
            code,
            kind_of(code, 3) if rank != ROUTER else Kind.NOT_A_SHARD,
            rank,
            seen,
        )
        for rank, code, seen in given
    ]


@pytest.mark.parametrize(
    "given, expected",
    [
        # A killed child is the cause, even if another end was noticed first.
        ([(0, 3, 0), (1, KILL, 5)], "shard 1"),
        ([(0, 1, 0), (2, SEGV, 1)], "shard 2"),
        ([(ROUTER, KILL, 0), (1, KILL, 3)], "shard 1"),
        # Then in order: failed by itself, exit code 0, ended because of another shard, the router.
        ([(0, 3, 0), (1, 0, 0), (2, 1, 2)], "shard 2"),
        ([(0, 3, 0), (1, 0, 2), (ROUTER, 1, 0)], "shard 1"),
        ([(ROUTER, 1, 0), (2, 3, 4)], "shard 2"),
        ([(ROUTER, 1, 0)], "the router"),
        # Of one kind: the earliest look, then the lowest rank.
        ([(0, KILL, 2), (1, KILL, 1)], "shard 1"),
        ([(2, 1, 0), (1, 1, 0)], "shard 1"),
        ([(2, 3, 0), (0, 3, 1)], "shard 2"),
    ],
)
def test_the_first_failure_is_named(given, expected):
    assert first_failure(ends(*given)).name == expected
    assert first_failure(ends(*reversed(given))).name == expected


@pytest.mark.parametrize(
    "rank, code, num_shards, expected",
    [
        (0, KILL, 3, False),
        (0, 1, 3, True),
        (0, 0, 3, True),
        (0, 3, 3, True),
        (0, 3, 1, False),  # a single shard can not wait for another
        (0, 1, 1, False),
        (ROUTER, KILL, 1, True),
        (ROUTER, 1, 3, True),
    ],
)
def test_an_end_may_be_a_consequence(rank, code, num_shards, expected):
    assert may_follow_another(*ends((rank, code, 0)), num_shards) is expected


def test_the_sentence_names_the_rank_and_how_it_ended():
    [killed, gave_up] = ends((1, KILL, 0), (0, 3, 0))
    assert killed.describe(was_ready=True) == (
        "shard 1 was killed by signal 9 (Killed), as the system does when memory runs out, while "
        "serving and printed nothing"
    )
    assert gave_up.describe().startswith(
        "shard 0 ended because another shard failed (exit code 3) and"
    )
    alone = End("shard 0", 3, kind_of(3, num_shards=1), 0, words=("a", "b"))
    assert alone.describe() == "shard 0 failed with exit code 3; its last lines:\n  a\n  b"


def test_names_with_the_same_message_are_grouped():
    said = [("shard 0", "compiling"), ("shard 1", ""), ("shard 2", "compiling"), ("shard 3", "")]
    assert grouped(said, " to be ready") == (
        "shard 0, shard 2 to be ready: compiling; shard 1, shard 3 to be ready"
    )
