"""One child: how its lines are relayed, what is kept of them, how it ends."""

import os
import signal
import subprocess
import sys

import pytest
from text_generation_launcher.process import RECENT_LINES, Command, ManagedProcess, ProcessError
from text_generation_process.log import LogLine

from launcher.tests.conftest import is_running, wait_until

LOG = """
log() { echo "{\\"level\\": \\"$1\\", \\"message\\": \\"$2\\"}"; }
"""


def command(script: str, **given) -> Command:
    """A shell as a child."""
    return Command("child", "child", ("/bin/sh", "-c", LOG + script), dict(os.environ), **given)


def ended(script: str, **given) -> tuple[ManagedProcess, list[LogLine]]:
    """A child that has ended by itself, and its relayed lines."""
    lines: list[LogLine] = []
    child = ManagedProcess(command(script, **given), lines.append)
    child.wait()
    child.drain()
    return child, lines


def test_lines_are_relayed_with_their_level_and_rank():
    child, lines = ended("log INFO a; echo plain; log WARNING b", rank=2)
    assert [(one.level, one.message, one.rank) for one in lines] == [
        ("INFO", "a", 2),
        ("INFO", "plain", 2),
        ("WARN", "b", 2),
    ]
    assert (child.returncode, child.last_message) == (0, "b")


def test_while_it_starts_an_error_is_held_until_the_next_line():
    child, lines = ended("log ERROR first; log INFO then; log ERROR last; exit 1")
    assert [one.message for one in lines] == ["first", "then"]
    assert child.last_words() == ("last",)
    child.settle()
    assert len(lines) == 2, "the caller logs the last words"


def test_a_held_error_is_logged_once_it_serves():
    lines: list[LogLine] = []
    child = ManagedProcess(command("log ERROR slow; sleep 600"), lines.append)
    wait_until(lambda: child.last_message == "slow")
    child.settle()
    assert [one.message for one in lines] == ["slow"]
    child.kill()


def test_last_words_are_the_last_errors_or_else_the_last_lines():
    child, _ = ended("log INFO a; log ERROR cause; log ERROR end; exit 1")
    assert child.last_words() == ("cause", "end")
    child, _ = ended("for n in $(seq 50); do echo $n; done; exit 3")
    assert child.last_words() == tuple(str(n) for n in range(51 - RECENT_LINES, 51))
    assert child.returncode == 3


def test_only_the_last_state_of_a_progress_bar_counts():
    _, lines = ended("printf '1%%\\r2%%\\r3%%\\n'")
    assert [one.message for one in lines] == ["3%"]


def test_its_process_group_ends_with_it():
    child = ManagedProcess(command("sleep 600 & echo $!; wait"), lambda line: None)
    wait_until(lambda: child.last_message != "")
    inner = int(child.last_message)
    assert not child.is_stopped
    child.kill()
    assert child.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(inner))


def test_a_child_that_draws_writes_to_the_standard_error_of_the_launcher(capfd):
    _, lines = ended("printf 'half a bar' >&2; echo a", draws=True)
    assert [one.message for one in lines] == ["a"]
    # gRPC, which other tests of this process use, may say something of the fork before.
    assert capfd.readouterr().err.endswith("half a bar")


def test_a_child_whose_launcher_is_already_dead_ends_itself():
    script = "from text_generation_process.worker import end_with_parent\nend_with_parent(-1)\n"
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL


def test_a_program_that_does_not_exist():
    missing = Command("shard 0", "shard", ("/nowhere/program",), {})
    with pytest.raises(ProcessError, match="cannot start shard 0: /nowhere/program: No such file"):
        ManagedProcess(missing, print)


def test_an_adopted_orphan_does_not_stay_as_a_zombie():
    """The first process of a container adopts all orphans."""
    script = (
        "import ctypes, os, subprocess, sys, time\n"
        "from text_generation_launcher.process import reap_orphans\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # PR_SET_CHILD_SUBREAPER
        "orphan = subprocess.check_output(['sh', '-c', 'sleep 0.1 >/dev/null & echo $!'])\n"
        "until = time.monotonic() + 10\n"
        "while os.path.exists(f'/proc/{int(orphan)}'):\n"
        "    reap_orphans(())\n"
        "    time.sleep(0.01)\n"
        "    assert time.monotonic() < until\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
