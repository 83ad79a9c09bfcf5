"""Which child is named when several have ended."""

import signal
from types import SimpleNamespace

import pytest
from text_generation_launcher import ends
from text_generation_launcher.ends import CAUSE_S, FAILING_S, diagnose, grouped

from launcher.tests.fakes import FakeLog

KILL, SEGV = -signal.SIGKILL, -signal.SIGSEGV
ROUTER = 3


def told_of(given, monkeypatch, num_shards=3) -> tuple[str, list[str], float]:
    """The sentence, the log and the seconds waited; shards and router end with (rank, exit code,
    seconds after the first end)."""
    clock = SimpleNamespace(now=0.0)
    told = {rank: (code, after_s) for rank, code, after_s in given}

    class Child:
        is_stopped = False

        def __init__(self, rank: int) -> None:
            self.name = "the router" if rank == ROUTER else f"shard {rank}"
            self._code, self._after_s = told.get(rank, (0, 1e9))
            # It has logged its error, and takes longer to end.
            self.is_failing = CAUSE_S < self._after_s < 1e9
            self.last_words = lambda: (self.name,)
            self.drain = lambda: None

        @property
        def is_alive(self) -> bool:
            return clock.now < self._after_s

        @property
        def returncode(self) -> int | None:
            return None if self.is_alive else self._code

    def wait(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(ends, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = FakeLog()
    shards = [Child(rank) for rank in range(num_shards)]
    died = diagnose(shards, [Child(ROUTER)], wait, log, was_ready=False)  # type: ignore[arg-type]
    return str(died), log.lines, clock.now


@pytest.mark.parametrize(
    "given, expected",
    [
        # A killed child is the cause, even if another end was noticed first.
        ([(0, 3, 0), (1, KILL, 0.3)], "shard 1"),
        ([(0, 1, 0), (2, SEGV, 0.1)], "shard 2"),
        ([(ROUTER, KILL, 0), (1, KILL, 0.3)], "shard 1"),
        # Then in order: failed by itself, exit code 0, ended because of another shard, the router.
        ([(0, 3, 0), (1, 0, 0), (2, 1, 0.2)], "shard 2"),
        ([(0, 3, 0), (1, 0, 0.2), (ROUTER, 1, 0)], "shard 1"),
        ([(ROUTER, 1, 0), (2, 3, 0.4)], "shard 2"),
        ([(ROUTER, 1, 0)], "the router"),
        ([(ROUTER, 1, 0), (0, 1, FAILING_S - 1)], "shard 0"),
        # Of one kind: the earliest, then the lowest rank.
        ([(0, 1, 0.1), (1, 1, 0)], "shard 1"),
        ([(2, 1, 0), (1, 1, 0)], "shard 1"),
        ([(2, 3, 0), (0, 3, 0.1)], "shard 2"),
    ],
)
def test_the_first_failure_is_named(given, expected, monkeypatch):
    sentence, others, _ = told_of(given, monkeypatch)
    assert sentence.startswith(f"{expected} ") and sentence.endswith(f": {expected}")
    assert len(others) == len(given) - 1


@pytest.mark.parametrize(
    "rank, code, num_shards, waits",
    [
        (0, KILL, 3, False),
        (0, 1, 3, True),
        (0, 0, 3, True),
        (0, 3, 1, False),  # a single shard can not wait for another
        (ROUTER, KILL, 1, True),
    ],
)
def test_a_possible_consequence_waits_for_its_cause(rank, code, num_shards, waits, monkeypatch):
    sentence, _, waited_s = told_of([(rank, code, 0)], monkeypatch, num_shards)
    assert waited_s == pytest.approx(CAUSE_S if waits else 0)
    assert "because another shard" not in sentence


def test_a_shard_that_hangs_after_its_error_is_not_waited_for_without_end(monkeypatch):
    sentence, _, waited_s = told_of([(ROUTER, 1, 0), (0, 1, 100)], monkeypatch)
    assert sentence.startswith("the router ") and waited_s == pytest.approx(FAILING_S)


def test_the_sentence_names_the_rank_and_how_it_ended(monkeypatch):
    sentence, others, _ = told_of([(1, KILL, 0.1), (0, 3, 0)], monkeypatch)
    assert sentence == (
        "shard 1 was killed by signal 9 (Killed), as the system does when memory runs out,: shard 1"
    )
    assert others == ["shard 0 ended because another shard failed (exit code 3): shard 0"]


def test_names_with_the_same_message_are_grouped():
    said = [("shard 0", "compiling"), ("shard 1", ""), ("shard 2", "compiling"), ("shard 3", "")]
    assert grouped(said, " to be ready") == (
        "shard 0, shard 2 to be ready: compiling; shard 1, shard 3 to be ready"
    )
