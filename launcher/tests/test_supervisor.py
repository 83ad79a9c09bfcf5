"""The life of a launcher with played children, in virtual time.

integration_tests/test_lifecycle.py and test_restarts.py have real ones.
"""

import os
import signal

import pytest
from text_generation_launcher.process import Command, ProcessError
from text_generation_process.option import Mode

from launcher.tests.fakes import FakeChild, World

DOWNLOAD = Command("the download", "download", ("download",), {})
READY = "Ready on"


def index_of(world: World, part: str) -> int:
    """The place of the one line that contains `part`."""
    [place] = [place for place, line in enumerate(world.log.lines) if part in line]
    return place


def test_children_are_started_and_stopped_router_first(world: World):
    def download(child: FakeChild) -> None:
        child.answer = {"model_path": "/models/downloaded"}
        world.after(3.0, lambda: child.end(0))

    world.behaviours["the download"] = download
    world.stop(10.0)
    assert world.run(download=DOWNLOAD, model_path=None, num_shards=2) == 0
    assert world.trace == [
        "the download started with download",
        "shard 0 started with /models/downloaded",
        "shard 1 started with /models/downloaded",
        "the router started with /models/downloaded",
        "the router got SIGTERM",
        "shard 0 got SIGTERM",
        "shard 1 got SIGTERM",
    ]
    ready = world.log.lines[index_of(world, READY)]
    assert " after 3.0 s - try: curl http://127.0.0.1:" in ready
    assert "Splitting the model over 2 shards" in world.log.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("state", ["the download", "shard 0", "the router"])
def test_a_signal_while_starting_ends_everything_with_0(world: World, state, number):
    world.behaviours[state] = lambda child: None  # never ready
    world.is_healthy = False
    world.stop(2.0, number)
    given = {"download": DOWNLOAD, "model_path": None} if state == "the download" else {}
    assert world.run(**given) == 0
    assert not any(child.is_alive for child in world.children.values())
    assert not any(READY in line for line in world.log.lines)


def test_hangup_is_ignored_under_nohup(world: World):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    world.stop(1.0, signal.SIGHUP)
    world.stop(5.0, signal.SIGINT)
    try:
        assert world.run() == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert world.now >= 5.0


@pytest.mark.parametrize("number", [0, signal.SIGCHLD])
def test_other_signals_stop_nothing(world: World, number):
    """After a stop that is longer than its wait CPython reports the signal 0."""
    world.after(1.0, lambda: number)
    world.stop(5.0)
    assert world.run() == 0
    assert world.now >= 5.0


def test_a_child_that_ignores_sigterm_is_killed_after_the_timeout(world: World):
    world.after(1.0, lambda: setattr(world.children["shard 0"], "is_stubborn", True))
    world.stop(2.0)
    assert world.run(termination_timeout_s=7.0) == 0
    assert "shard 0 did not stop within 7 s: killing it" in world.log.lines
    assert world.now >= 9.0
    assert world.children["shard 0"].returncode == -signal.SIGKILL


def test_a_second_signal_kills_at_once_with_1(world: World):
    world.after(1.0, lambda: setattr(world.children["the router"], "is_stubborn", True))
    world.stop(2.0)
    world.stop(3.0)
    assert world.run() == 1
    assert "received SIGTERM again: killing everything" in world.log.lines
    # It may send last events before it is killed.
    assert world.trace.count("the router got SIGTERM") == 2
    assert world.now < 6.0
    assert not any(child.is_alive for child in world.children.values())


@pytest.mark.parametrize(
    "code, words, expected",
    [
        (1, ("no such weights",), "shard 0 failed with exit code 1: no such weights"),
        (3, ("a", "b"), "shard 0 failed with exit code 3; its last lines:\n  a\n  b"),
        (0, (), "shard 0 ended unexpectedly with exit code 0 and printed nothing"),
    ],
)
def test_a_child_that_ends_while_it_starts_is_the_last_line(world: World, code, words, expected):
    world.behaviours["shard 0"] = lambda child: None
    world.end_later("shard 0", 1.0, code, *words)
    assert world.run() == 1
    assert world.log.lines[-1] == expected
    assert not any(child.is_alive for child in world.children.values())


def test_a_shard_that_can_not_be_started_ends_those_before_it(world: World):
    def refuse(child: FakeChild) -> None:
        child.end(0)
        raise ProcessError("cannot start shard 1")

    world.behaviours["shard 1"] = refuse
    assert world.run(num_shards=2) == 1
    assert "cannot start shard 1" in world.log.lines
    assert "shard 0 got SIGTERM" in world.trace


def test_the_child_that_failed_first_is_named(world: World):
    """Its end is noticed after the ends of the shard and the router that it caused."""
    world.end_later("shard 0", 1.0, 3, "shard 1 did not come within 20 s in message 7")
    world.end_later("the router", 1.0, 1, "the shards do not answer")
    world.end_later("shard 1", 1.3, -signal.SIGSEGV, "the last step of shard 1")
    assert world.run(num_shards=3) == 1
    expected = "shard 1 was killed by signal 11 (Segmentation fault) while serving: the last step"
    assert world.log.lines[-1].startswith(expected)
    index_of(world, "shard 0 ended because another shard failed")


def test_ranks_that_report_the_same_error_are_logged_once(world: World):
    for rank in range(3):
        world.behaviours[f"shard {rank}"] = lambda child: None
        world.end_later(f"shard {rank}", 1.0, 1, "num_shard 3 can not split this model")
    assert world.run(num_shards=3) == 1
    assert index_of(world, "can not split") == len(world.log.lines) - 1


@pytest.mark.parametrize(
    "code, answer, expected",
    [
        (1, None, "the download failed with exit code 1: no such repository"),
        (0, None, "without the model's directory as its last line"),
        (0, {"model_path": 3}, "without the model's directory as its last line"),
    ],
)
def test_a_failed_download(world: World, code, answer, expected):
    world.behaviours["the download"] = lambda child: setattr(child, "answer", answer)
    world.end_later("the download", 1.0, code, *(["no such repository"] if code else []))
    assert world.run(download=DOWNLOAD, model_path=None) == 1
    assert expected in world.log.lines[-1]
    assert list(world.children) == ["the download"]


def test_the_log_says_what_is_waited_for(world: World):
    for rank in (0, 2):
        message = f"loading weights: {40 - rank} of 80 tensors"
        world.behaviours[f"shard {rank}"] = lambda child, m=message: setattr(
            child, "last_message", m
        )
    told: list[int] = []

    def keep_end(child: FakeChild) -> None:
        [given] = [one for one in child.command.argv if one.startswith("--launcher-fd=")]
        told.append(os.dup(int(given.partition("=")[2])))

    world.behaviours["the router"] = keep_end
    world.stop(7.0)
    assert world.run(num_shards=3) == 0
    assert b"shard 0: loading weights: 40 of 80 tensors" in os.read(told[0], 4096)
    os.close(told[0])
    index_of(
        world,
        "Waiting for shard 0 to be ready: loading weights: 40 of 80 tensors; "
        "shard 2 to be ready: loading weights: 38 of 80 tensors",
    )


def test_processes_are_replaced_while_serving(world: World):
    world.end_later("shard 0", 1.0, -signal.SIGKILL)
    world.end_later("the router", 20.0, 1, "a bug")
    world.stop(40.0)
    assert world.run(restarts=True) == 0
    assert [line.split(" started")[0] for line in world.trace if "started" in line] == [
        *("shard 0", "the router", "shard 0", "the router")
    ]
    assert "--num-restarts=1" in world.children["the router"].command.argv
    assert sum("Ready again after" in line for line in world.log.lines) == 2


def test_processes_that_do_not_serve_again_are_ended(world: World):
    """And started again, until there were too many ends."""
    world.end_later("the router", 1.0, -signal.SIGKILL)
    world.after(0.5, lambda: setattr(world, "is_healthy", False))
    assert world.run(restarts=True) == 1
    assert world.log.lines[-1] == "the replaced processes do not serve after 60 s"
    assert sum(line.startswith("the router started") for line in world.trace) == 6


def test_a_batch_that_has_lost_its_shard_is_not_the_cause(world: World):
    """It notices the closed socket before the process has ended."""
    world.end_later("the batch", 1.0, 1)
    world.end_later("shard 1", 1.2, -signal.SIGKILL)
    assert world.run(Mode.BATCH, num_shards=2) == 1
    assert "shard 1 was killed by signal 9" in world.log.lines[-1]
