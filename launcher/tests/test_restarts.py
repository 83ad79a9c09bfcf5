"""Restarts of ended processes: when and how often; the router's heartbeat."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from text_generation_launcher.config import create_config
from text_generation_launcher.failures import ChildDied
from text_generation_launcher.heartbeat import GAP_S, SILENCE_S, STARTING_SILENCE_S, Heartbeat
from text_generation_launcher.log import Log
from text_generation_launcher.option import Mode
from text_generation_launcher.options import read_options
from text_generation_launcher.process import Command, ManagedProcess
from text_generation_launcher.progress import ProgressPipe
from text_generation_launcher.replacements import LEAST_PATIENCE_S, Part, Replacements
from text_generation_launcher.restarts import LIMIT, WINDOW_S, Restart, Restarts
from text_generation_launcher.supervisor import Supervisor

ALIVE = b'{"event": "alive"}\n'


def test_the_first_comes_at_once_and_others_in_a_row_later():
    restarts = Restarts()
    found = [restarts.after_end(now) for now in (100.0, 103.0, 106.0, 110.0, 115.0, 120.0)]
    assert [one.delay_s for one in found[:5] if one] == [0, 0.5, 1, 2, 4]
    assert [one.number for one in found[:5] if one] == [1, 2, 3, 4, 5]
    assert found[5] is None
    assert restarts.total == LIMIT
    assert str(found[1]) == "2 of 5 in 10 minutes"


def test_rare_ends_do_not_add_up():
    restarts = Restarts()
    for hour in range(3):
        for minute in (0, 2, 4, 6, 8):
            found = restarts.after_end(hour * 3600 + minute * 60.0)
            assert found == Restart(minute // 2 + 1, 0.0)
    # At this time the first of five leaves the window.
    assert restarts.after_end(2 * 3600 + WINDOW_S) == Restart(5, 0.0)


@pytest.fixture
def beat():
    heartbeat = Heartbeat()
    heartbeat.note_serving()
    yield heartbeat
    heartbeat.close()


# Until a router serves, and then.
SERVES = (60.0, 0.4)
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
STOPPED = " (the router is stopped, as by SIGSTOP)"


def test_silence_begins_with_the_first_word(beat: Heartbeat):
    assert not beat.is_silent(0)
    assert not beat.is_silent(2)
    assert not beat.is_silent(100)
    os.write(beat.writer, ALIVE)
    assert not beat.is_silent(101)
    times = [101 + step for step in (1.0, 2.0, 3.0, 4.0, SILENCE_S)]
    assert not any(beat.is_silent(now) for now in times)
    assert beat.is_silent(101.1 + SILENCE_S)


def test_a_router_that_starts_may_read_a_large_tokenizer():
    heartbeat = Heartbeat()
    os.write(heartbeat.writer, ALIVE)
    seconds = range(int(STARTING_SILENCE_S) + 2)
    assert [heartbeat.is_silent(now) for now in seconds].index(True) == STARTING_SILENCE_S + 1
    os.write(heartbeat.writer, ALIVE)
    assert not heartbeat.is_silent(100)
    heartbeat.note_serving()
    assert [heartbeat.is_silent(100 + now) for now in range(7)].index(True) == SILENCE_S + 1
    heartbeat.close()


def test_a_late_read_is_no_verdict(beat: Heartbeat):
    os.write(beat.writer, ALIVE)
    assert not beat.is_silent(0)
    later = 1000.0
    assert not beat.is_silent(later)
    assert not beat.is_silent(later + GAP_S)
    assert beat.is_silent(later + GAP_S + GAP_S)


def test_what_was_said_meanwhile_counts(beat: Heartbeat):
    os.write(beat.writer, ALIVE)
    assert not beat.is_silent(0)
    assert not beat.is_silent(2.5)
    os.write(beat.writer, ALIVE * 1000)
    assert not beat.is_silent(5.4)
    assert beat.losses == []


@pytest.mark.parametrize(
    ("router", "silences_s", "stopped"),
    [
        (f"begin('router'); beat(); {STOPS}", (0.4, 60.0), STOPPED),
        (
            f"beat(); signal.signal(signal.SIGUSR1, lambda *_: {STOPS}); serve_router()",
            SERVES,
            STOPPED,
        ),
        ("beat(); serve_router()", SERVES, ""),
    ],
    ids=["it is stopped while it loads", "it is stopped", "its loop is blocked"],
)
def test_without_restarts_a_silent_router_is_the_end(launch, router, silences_s, stopped):
    launched = launch(router=router, silences_s=silences_s)
    pid = launched.wait_for_child("router")
    if silences_s is SERVES:
        launched.wait_for_line("Ready on")
        os.kill(pid, signal.SIGUSR1 if stopped else 0)
    code, lines = launched.end()
    assert code == 1
    assert lines[-1].endswith(f"the router has not answered for 0.4 s{stopped}")
    assert " ERROR " in lines[-1]
    launched.assert_no_orphan()


def test_losses_are_kept_in_order_whatever_stands_beside(beat: Heartbeat):
    lines = b'{"event": "lost", "why": "a\\nb"}\n[1]\nnonsense\n{"event":"lost"}\n{"event": "lo'
    os.write(beat.writer, lines)
    beat.is_silent(0)
    assert beat.losses == ["a\nb", "the router gave no reason"]
    os.write(beat.writer, b'st", "why": "c"}\n')
    beat.is_silent(1)
    assert beat.losses[2:] == ["c"]


def test_progress_never_waits():
    pipe = ProgressPipe()
    for message in ("shard 0: one", "shard 0: one", "shard 0: a\nb"):
        pipe.tell(message)
    assert os.read(pipe.reader, 100) == b"shard 0: one\nshard 0: a b\n"
    # A router that does not read: lines are dropped, and whole ones are there.
    for number in range(100):
        pipe.tell(f"{number}" * 3000)
    lines = os.read(pipe.reader, 1 << 20).split(b"\n")
    assert lines.pop() == b"" and 1 < len(lines) < 100
    pipe.tell("there is room again")
    assert os.read(pipe.reader, 100) == b"there is room again\n"
    pipe.hand_over()
    pipe.tell("the router has ended")
    pipe.close()


def test_the_pipe_ends_with_the_router(beat: Heartbeat):
    beat.hand_over()
    assert not beat.is_silent(0)


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)

    error = info


class FakeFamily:
    """Two parts; a test sets which has ended."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.started: list[tuple[str, int]] = []
        self.is_ready = False
        self.log = FakeLog()
        parts = tuple(map(self._part, ("shard 0", "the router")))
        self.replacements = Replacements(parts, lambda: self.is_ready, self.log)  # type: ignore[arg-type]

    def _part(self, name: str) -> Part:
        return Part(
            *(name, "is"),
            has_ended=lambda: name in self.ended,
            end=lambda: self.ended.discard(name),
            start=lambda total: self.started.append((name, total)),
        )

    def die(self, now: float, *names: str) -> None:
        self.ended |= set(names)
        self.replacements.take_away(ChildDied(f"{names[0]} died", "it died"), now)


def test_only_what_has_ended_is_replaced():
    family = FakeFamily()
    family.die(10.0, "shard 0")
    assert not family.replacements.is_whole
    family.replacements.bring_back(10.0)
    assert family.started == [("shard 0", 1)]
    family.is_ready = True
    family.replacements.bring_back(11.5)
    assert family.replacements.is_whole
    assert family.log.lines == [
        "shard 0 died",
        "shard 0 is replaced (1 of 5 in 10 minutes)",
        "Ready again after 1.5 s",
    ]


def test_what_ends_again_waits():
    family = FakeFamily()
    family.die(10.0, "the router", "shard 0")
    family.replacements.bring_back(10.0)
    family.die(11.0, "shard 0")
    family.is_ready = True
    family.replacements.bring_back(11.1)
    assert family.started == [("shard 0", 1), ("the router", 1)]
    assert not family.replacements.is_whole
    family.replacements.bring_back(11.6)
    assert family.started[2:] == [("shard 0", 2)]
    assert family.replacements.is_whole
    assert "shard 0 is replaced (2 of 5 in 10 minutes), in 0.5 s" in family.log.lines
    assert family.log.lines[-1] == "Ready again after 1.6 s"


def test_what_was_started_again_must_serve_in_time():
    family = FakeFamily()
    late = family.replacements
    assert not late.is_late(1000.0)
    family.die(2000.0, "shard 0")
    assert not late.is_late(5000.0)
    late.bring_back(5000.0)
    assert not late.is_late(5000.0 + late.patience_s)
    assert late.is_late(5001.0 + late.patience_s)
    family.is_ready = True
    late.bring_back(5001.0 + late.patience_s)
    assert not late.is_late(9000.0)


def test_a_slow_first_start_gives_the_others_more_time():
    first_starts = (1.0, 20.0)
    log = FakeLog()
    late = [Replacements((), lambda: True, log, seconds) for seconds in first_starts]  # type: ignore[arg-type]
    assert [one.patience_s for one in late] == [LEAST_PATIENCE_S, 200.0]


def test_all_are_ended_that_do_not_serve(supervisor: Supervisor):
    with pytest.raises(ChildDied, match="the replaced processes do not serve after 60 s"):
        supervisor._end_late(60.0)
    assert not any(child.is_alive for child in supervisor._watched())


def test_too_many_ends_are_passed_on():
    family = FakeFamily()
    for now in range(LIMIT):
        family.die(now * 100.0, "shard 0")
        family.replacements.bring_back(now * 100.0)
    family.die(500.0, "the router")
    with pytest.raises(ChildDied, match="shard 0 died"):
        family.die(510.0, "shard 0")
    assert family.log.lines[-1] == (
        "shard 0 is not replaced again: the limit is 5 times in 10 minutes"
    )


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


@pytest.mark.parametrize("mode", [Mode.SHARDS, Mode.BATCH])
def test_other_modes_have_none(mode, capsys):
    with pytest.raises(SystemExit):
        read_options(["--no-restart"], {}, mode)
    assert "unrecognized arguments: --no-restart" in capsys.readouterr().err
    assert "restart" not in read_options([], {"RESTART": "true"}, mode)


def test_a_descriptor_is_inherited():
    reader, writer = os.pipe()
    program = f"import os; os.write({writer}, b'x'); print('done')"
    command = Command(
        "child",
        "child",
        ("/usr/bin/env", "python3", "-c", program),
        dict(os.environ),
        descriptors=(writer,),
    )
    child = ManagedProcess(command, lambda line: None)
    os.close(writer)
    assert os.read(reader, 10) == b"x" and os.read(reader, 10) == b""
    os.close(reader)
    child.kill()
    assert child.returncode in (0, -signal.SIGKILL)


class FakeChild:
    def __init__(self) -> None:
        self.is_alive, self.is_stopped, self.name = True, False, "child"

    def kill(self) -> None:
        self.is_alive = False


@pytest.fixture
def supervisor(tmp_path: Path, beat: Heartbeat):
    """Two shards that do not listen yet, and the router; all have just been restarted."""
    values = read_options(["--num-shard=2", f"--shard-uds-path={tmp_path / 'shard'}"], {})
    supervisor = Supervisor(create_config(values, {}), Log("ERROR", False))
    paths = [str(tmp_path / name) for name in ("shard-0", "shard-1")]
    supervisor._addresses = SimpleNamespace(sockets=SimpleNamespace(paths=paths))  # type: ignore[assignment]
    supervisor._shards = [FakeChild(), FakeChild()]  # type: ignore[list-item]
    supervisor._router, supervisor._heartbeat = FakeChild(), beat  # type: ignore[assignment]
    supervisor._is_socket_awaited = True
    return supervisor


def test_shards_may_be_given_up_of_which_one_never_listens(
    supervisor: Supervisor, beat: Heartbeat, tmp_path: Path
):
    loss = b'{"event": "lost", "why": "they do not answer"}\n'
    os.write(beat.writer, loss)
    supervisor._listen()  # the losses of the shards before
    (tmp_path / "shard-0").touch()
    supervisor._listen()
    os.write(beat.writer, loss)
    with pytest.raises(ChildDied, match="declared the shards lost: they do not answer"):
        supervisor._listen()
    assert not any(shard.is_alive for shard in supervisor._shards)
