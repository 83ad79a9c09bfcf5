"""Restarts of ended processes: when, how often, and of which."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from text_generation_launcher.config import create_config
from text_generation_launcher.ends import (
    LEAST_PATIENCE_S,
    LIMIT,
    WINDOW_S,
    ChildDied,
    Part,
    Restarts,
)
from text_generation_launcher.options import read_options

from launcher.tests.fakes import FakeChild, FakeLog, World


class FakeFamily:
    """Two parts that serve since the time 0; a test sets which has ended."""

    def __init__(self, first_start_s: float = 0.0) -> None:
        self.started: list[tuple[str, int]] = []
        self.is_ready = False
        self.log = FakeLog()
        self.parts = {name: self.part(name) for name in ("shard 0", "the router")}
        parts = tuple(self.parts.values())
        announce = self.started.clear
        self.restarts = Restarts(parts, lambda: self.is_ready, announce, self.log, True)  # type: ignore[arg-type]
        self.restarts.bring_back(-first_start_s)
        self.is_ready = True
        self.restarts.bring_back(0.0)
        self.is_ready = False

    def part(self, name: str) -> Part:
        def start(total: int) -> list[Any]:
            self.started.append((name, total))
            return [SimpleNamespace(name=name, is_alive=True, kill=lambda: None)]

        return Part(start, clear=lambda: None)

    def die(self, now: float, *names: str) -> None:
        for name in names:
            for child in self.parts[name].children:
                child.is_alive = False  # type: ignore[misc]
        self.restarts.take_away(ChildDied(f"{names[0]} died", "it died"), now)


def test_the_first_restart_comes_at_once_and_others_in_a_row_later():
    part = FakeFamily().part("shard 0")
    found = [part.delay_after_end(now) for now in (100.0, 103.0, 106.0, 110.0, 115.0, 120.0)]
    assert found == [0, 0.5, 1, 2, 4, None]
    assert part.total == LIMIT


def test_rare_ends_do_not_add_up():
    part = FakeFamily().part("shard 0")
    for hour in range(3):
        for minute in (0, 2, 4, 6, 8):
            assert part.delay_after_end(hour * 3600 + minute * 60.0) == 0.0
            assert len(part.ends) == minute // 2 + 1
    # At this time the first of five leaves the window.
    assert part.delay_after_end(2 * 3600 + WINDOW_S) == 0.0
    assert len(part.ends) == LIMIT


def test_a_part_that_ends_again_waits():
    family = FakeFamily()
    family.die(10.0, "the router", "shard 0")
    family.restarts.bring_back(10.0)
    family.die(11.0, "shard 0")
    family.is_ready = True
    family.restarts.bring_back(11.1)
    assert family.started == [("shard 0", 1), ("the router", 1)]
    assert not family.restarts.is_whole
    family.restarts.bring_back(11.6)
    assert family.started[2:] == [("shard 0", 2)]
    assert "shard 0 is replaced (2 of 5 in 10 minutes), in 0.5 s" in family.log.lines
    assert family.log.lines[-1] == "Ready again after 1.6 s"


def test_replaced_processes_must_serve_in_time():
    family = FakeFamily()
    late = family.restarts
    assert not late.is_late(1000.0)
    family.die(2000.0, "shard 0")
    assert not late.is_late(5000.0)
    late.bring_back(5000.0)
    assert not late.is_late(5000.0 + late.patience_s)
    assert late.is_late(5001.0 + late.patience_s)
    family.is_ready = True
    late.bring_back(5001.0 + late.patience_s)
    assert not late.is_late(9000.0)
    # A slow first start gives the others more time.
    patience = [FakeFamily(seconds).restarts.patience_s for seconds in (1.0, 20.0)]
    assert patience == [LEAST_PATIENCE_S, 200.0]


@pytest.mark.parametrize(
    ("argv", "environment", "restarts"),
    [
        ([], {}, True),
        (["--no-restart"], {}, False),
        ([], {"RESTART": "false"}, False),
        (["--restart"], {"RESTART": "false"}, True),
        (["--restart", "--no-restart"], {}, False),
    ],
)
def test_flags(argv, environment, restarts):
    values = read_options([*argv, "--resume-streams=false"], environment)
    config = create_config(values, environment)
    assert config.restarts == restarts
    assert config.router is not None
    assert ("--restart" in config.router.argv) == restarts
    assert "--resume-streams=false" in config.router.argv
    assert any("--resume-streams has no effect" in note for note in config.notes) != restarts


def test_too_many_ends_are_the_end_with_the_sentence_of_the_first(world: World):
    def fail_later(child: FakeChild) -> None:
        world.listen(child)
        world.after(2.0, lambda: child.end(7, "config.json is gone"))

    world.behaviours["shard 0"] = fail_later
    assert world.run(restarts=True) == 1
    assert "shard 0 is replaced (5 of 5 in 10 minutes), in 4 s" in world.log.lines
    assert "shard 0 is not replaced again: the limit is 5 times in 10 minutes" in world.log.lines
    assert world.log.lines[-1].endswith("config.json is gone")


def pipe_of(child: FakeChild) -> int:
    """The end of the pipe that a router got, which stays open."""
    [given] = [one for one in child.command.argv if one.startswith("--launcher-fd=")]
    return os.dup(int(given.partition("=")[2]))


def test_losses_count_once_new_shards_listen(world: World):
    pipes: list[int] = []
    alive, lost = b"alive\n", b'{"event": "lost", "why": "they do not answer"}\n'

    def listen_late(child: FakeChild) -> None:
        (world.folder / "shard-0").unlink(missing_ok=True)
        world.after(5.0, lambda: world.listen(child))

    world.behaviours["the router"] = lambda child: pipes.append(pipe_of(child))
    world.behaviours["shard 0"] = listen_late
    world.end_later("shard 0", 10.0, -signal.SIGKILL)
    for second in range(1, 80):
        line = lost if second in (12, 40) else alive  # of the shard before, and of the new one
        world.after(second, lambda line=line: os.write(pipes[-1], line))
    world.stop(80.0)
    assert world.run(restarts=True) == 0
    assert [line for line in world.log.lines if "is replaced" in line] == [
        f"shard 0 is replaced ({number} of 5 in 10 minutes)" + ", in 0.5 s" * (number - 1)
        for number in (1, 2)
    ]
    assert "the router has declared the shards lost: they do not answer" in world.log.lines
    assert sum(line.startswith("the router started") for line in world.trace) == 1
    os.close(pipes[0])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_silent_router_is_named_and_ended(world: World, is_stopped: bool):
    def beat_once(child: FakeChild) -> None:
        pipe = pipe_of(child)
        os.write(pipe, b'{"event": "alive"}\n')
        os.close(pipe)
        child.is_stopped = is_stopped

    world.behaviours["the router"] = beat_once
    assert world.run() == 1
    stopped = " (the router is stopped, as by SIGSTOP)" if is_stopped else ""
    assert world.log.lines[-1] == f"the router has not answered for 5 s{stopped}"
    assert not world.children["the router"].is_alive
