"""What the router reports, when it is silent, and what it is told."""

import os
from collections.abc import Iterator

import pytest
from text_generation_launcher.router_link import GAP_S, SILENCE_S, STARTING_SILENCE_S, RouterLink

ALIVE = b'{"event": "alive"}\n'


@pytest.fixture
def link() -> Iterator[RouterLink]:
    """Of a router that serves."""
    link = RouterLink()
    link.note_serving()
    yield link
    link.close()


def test_silence_begins_with_the_first_message(link: RouterLink):
    assert not any(link.is_silent(now) for now in (0, 2, 100))
    os.write(link.router_fd, ALIVE)
    times = [101.0 + step for step in (0, 1, 2, 3, 4, SILENCE_S)]
    assert not any(link.is_silent(now) for now in times)
    assert link.is_silent(101.1 + SILENCE_S)


def test_a_router_that_starts_may_read_a_large_tokenizer():
    link = RouterLink()
    os.write(link.router_fd, ALIVE)
    seconds = range(int(STARTING_SILENCE_S) + 2)
    assert [link.is_silent(now) for now in seconds].index(True) == STARTING_SILENCE_S + 1
    os.write(link.router_fd, ALIVE)
    link.note_serving()
    assert [link.is_silent(100 + now) for now in range(7)].index(True) == SILENCE_S + 1
    link.close()


def test_a_late_read_is_no_verdict(link: RouterLink):
    os.write(link.router_fd, ALIVE)
    later = 1000.0
    assert not any(link.is_silent(now) for now in (0, later, later + GAP_S))
    assert link.is_silent(later + GAP_S + GAP_S)


def test_losses_are_kept_in_order_and_other_data_is_skipped(link: RouterLink):
    for message in (b'{"event": "lost", "why": "a\\nb"}', b"[1]", b"nonsense", b'{"event":"lost"}'):
        os.write(link.router_fd, message)
    link.is_silent(0)
    assert link.take_losses() == ["a\nb", "the router gave no reason"]
    os.write(link.router_fd, b'{"event": "lost", "why": "c"}')
    link.is_silent(1)
    assert link.take_losses() == ["c"]


def test_telling_never_waits(link: RouterLink):
    for message in ("shard 0: one", "shard 0: one", "shard 0: two"):
        link.tell(message)
    assert os.read(link.router_fd, 100) == b"shard 0: one\n"
    assert os.read(link.router_fd, 100) == b"shard 0: two\n"
    # A router that does not read: messages are dropped.
    for number in range(1000):
        link.tell(f"{number}" * 3000)
    assert os.read(link.router_fd, 1 << 20).startswith(b"000")
    link.tell("there is room again")
    link.hand_over()
    link.tell("the router has ended")
