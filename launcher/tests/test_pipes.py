"""What the router reports, when it is silent, and what it is told."""

import os
from collections.abc import Iterator

import pytest
from text_generation_launcher.pipes import GAP_S, SILENCE_S, STARTING_SILENCE_S, RouterPipes

ALIVE = b'{"event": "alive"}\n'


@pytest.fixture
def pipes() -> Iterator[RouterPipes]:
    """Of a router that serves."""
    pipes = RouterPipes()
    pipes.note_serving()
    yield pipes
    pipes.close()


def test_silence_begins_with_the_first_message(pipes: RouterPipes):
    assert not any(pipes.is_silent(now) for now in (0, 2, 100))
    os.write(pipes.launcher_fd, ALIVE)
    times = [101.0 + step for step in (0, 1, 2, 3, 4, SILENCE_S)]
    assert not any(pipes.is_silent(now) for now in times)
    assert pipes.is_silent(101.1 + SILENCE_S)


def test_a_router_that_starts_may_read_a_large_tokenizer():
    pipes = RouterPipes()
    os.write(pipes.launcher_fd, ALIVE)
    seconds = range(int(STARTING_SILENCE_S) + 2)
    assert [pipes.is_silent(now) for now in seconds].index(True) == STARTING_SILENCE_S + 1
    os.write(pipes.launcher_fd, ALIVE)
    pipes.note_serving()
    assert [pipes.is_silent(100 + now) for now in range(7)].index(True) == SILENCE_S + 1
    pipes.close()


def test_a_late_read_is_no_verdict(pipes: RouterPipes):
    os.write(pipes.launcher_fd, ALIVE)
    later = 1000.0
    assert not any(pipes.is_silent(now) for now in (0, later, later + GAP_S))
    assert pipes.is_silent(later + GAP_S + GAP_S)


def test_losses_are_kept_in_order_and_other_data_is_skipped(pipes: RouterPipes):
    lines = b'{"event": "lost", "why": "a\\nb"}\n[1]\nnonsense\n{"event":"lost"}\n{"event": "lo'
    os.write(pipes.launcher_fd, lines)
    pipes.is_silent(0)
    assert pipes.losses == ["a\nb", "the router gave no reason"]
    os.write(pipes.launcher_fd, b'st", "why": "c"}\n')
    pipes.is_silent(1)
    assert pipes.losses[2:] == ["c"]


def test_telling_never_waits(pipes: RouterPipes):
    for message in ("shard 0: one", "shard 0: one", "shard 0: a\nb"):
        pipes.tell(message)
    assert os.read(pipes.progress_fd, 100) == b"shard 0: one\nshard 0: a b\n"
    # A router that does not read: lines are dropped, and whole ones are there.
    for number in range(100):
        pipes.tell(f"{number}" * 3000)
    lines = os.read(pipes.progress_fd, 1 << 20).split(b"\n")
    assert lines.pop() == b"" and 1 < len(lines) < 100
    pipes.tell("there is room again")
    assert os.read(pipes.progress_fd, 100) == b"there is room again\n"
    pipes.hand_over()
    pipes.tell("the router has ended")
