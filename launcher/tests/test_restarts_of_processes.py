"""A real launcher replaces children, which are small scripts, that are killed or stopped."""

import os
import signal

import pytest

from launcher.tests.conftest import Launched, is_running, wait_until

SILENCE_S = 0.4
# A router that says that it is alive, as long as it is not stopped.
ROUTER = """
import threading
def beats():
    while True:
        beat()
        time.sleep(0.05)
threading.Thread(target=beats, daemon=True).start()
serve_router()
"""


def pids(launched: Launched) -> dict[str, int]:
    """The process ids of shard and router."""
    return {name: launched.wait_for_child(name) for name in ("shard", "router")}


def stop(launched: Launched) -> list[str]:
    """The whole log; the launcher ends in order."""
    launched.process.send_signal(signal.SIGTERM)
    code, lines = launched.end()
    assert code == 0, lines
    launched.assert_no_orphan()
    return lines


def test_a_router_that_is_stopped_is_replaced(launch):
    launched = launch(router=ROUTER, silences_s=(60.0, SILENCE_S), restarts=True)
    launched.wait_for_line("Ready on")
    before = pids(launched)
    os.kill(before["router"], signal.SIGSTOP)
    launched.wait_for_line("the router has not answered for 0.4 s (the router is stopped, as by")
    launched.wait_for_line("Ready again after")
    assert not is_running(before["router"])
    assert pids(launched)["shard"] == before["shard"]
    stop(launched)


def test_too_many_ends_are_the_end_with_the_sentence_of_the_first(launch):
    shard = "serve_shard(); wait_for('end'); log('ERROR', 'config.json is gone'); os._exit(7)"
    launched = launch(shard=shard, restarts=True)
    launched.wait_for_line("Ready on")
    (launched.folder / "end").touch()
    code, lines = launched.end()
    assert code == 1
    assert any("shard 0 is replaced (5 of 5 in 10 minutes)" in line for line in lines)
    assert any("is not replaced again: the limit is 5 times in 10 minutes" in x for x in lines)
    assert " ERROR " in lines[-1] and lines[-1].endswith("config.json is gone")
    launched.assert_no_orphan()


@pytest.mark.parametrize("name", ["shard", "router"])
def test_a_stop_while_one_is_replaced(launch, name):
    hangs_again = f"if (FOLDER / 'again').exists(): begin({name!r}); sleep()\n"
    scripts = {name: hangs_again + f"serve_{name}(); sleep()"}
    launched = launch(**scripts, restarts=True)
    launched.wait_for_line("Ready on")
    before = launched.wait_for_child(name)
    (launched.folder / "again").touch()
    os.kill(before, signal.SIGKILL)
    launched.wait_for_line("is replaced (1 of 5")
    wait_until(lambda: launched.wait_for_child(name) != before)
    assert not any("Ready again" in line for line in stop(launched))
