"""Several shards: which are waited for, which is named, and that all end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from text_generation_launcher.ports import AddressError, MeetingPort

from launcher.tests.conftest import SETTLED_S

# A shard that ends because shard 1 does not come, once the file `give_up` exists.
GIVES_UP = """
serve_shard()
while not (FOLDER / "give_up").exists(): time.sleep(0.01)
log("ERROR", "shard 1 did not come within 20 s in message 7")
os._exit(3)
"""


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if " ERROR text_generation_launcher" in line]


def test_all_ranks_are_started_waited_for_and_stopped(launch, tmp_path):
    shard = "log('INFO', 'meets at ' + sys.argv[2]); serve_shard(); sleep()"
    launched = launch(shard=shard, num_shards=3)
    launched.wait_for_line("Ready on")
    assert any("Splitting the model over 3 shards" in line for line in launched.lines)
    assert all((tmp_path / f"shard-{rank}").exists() for rank in range(3))
    # Each line has its rank. All meet at one port, on which rank 0 can listen.
    met = sorted(line.partition("child ")[2] for line in launched.lines if "meets at" in line)
    port = int(met[0].rpartition(" ")[2])
    assert met == [f"rank={rank}: meets at {port}" for rank in range(3)]
    socket.create_server(("localhost", port)).close()
    # No other launcher gets it, and the system does not choose it as a free port.
    with pytest.raises(AddressError, match=f"port {port} on localhost is already in use: another"):
        MeetingPort("localhost", port)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    trace = launched.trace()
    assert trace[-4] == "router got SIGTERM"
    assert sorted(trace[-3:]) == [f"{name} got SIGTERM" for name in ("shard", "shard-1", "shard-2")]
    assert not list(tmp_path.glob("shard-[0-9]"))
    launched.assert_no_orphan()


def test_a_meeting_port_in_use_is_said_before_anything_starts(free_port):
    argv = ["shards", "--num-shard", "2", "--master-port", str(free_port)]
    with socket.create_server(("localhost", free_port)):
        done = subprocess.run(
            [sys.executable, "-m", "text_generation_launcher.cli", *argv],
            capture_output=True,
            text=True,
            timeout=SETTLED_S,
        )
    assert done.returncode == 1
    expected = f"port {free_port} on localhost is already in use: choose another with --master-port"
    assert done.stdout.splitlines()[-1].endswith(expected)


def test_the_shard_that_failed_first_is_named_last(launch):
    """Its end is noticed after the ends of the shards and the router that it caused."""
    shard = f"""
if RANK != 1:
    {GIVES_UP.strip().replace(chr(10), chr(10) + "    ")}
serve_shard()
log("INFO", "the last step of shard 1")
while not (FOLDER / "is_lost").exists(): time.sleep(0.01)
time.sleep(0.1)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    router = """
import threading
def fail():
    while not (FOLDER / "give_up").exists(): time.sleep(0.01)
    log("ERROR", "the shards do not answer")
    (FOLDER / "is_lost").touch()
    os._exit(1)
threading.Thread(target=fail).start()
serve_router()
"""
    launched = launch(shard=shard, router=router, num_shards=3)
    launched.wait_for_line("Ready on")
    (launched.folder / "give_up").touch()
    code, lines = launched.end()
    assert code == 1
    assert len(errors(lines)) == 1
    expected = (
        "shard 1 was killed by signal 11 (Segmentation fault) while serving: the last step of"
    )
    assert expected in lines[-1]
    told = [line for line in lines if "shard 0 ended because another shard failed" in line]
    assert len(told) == 1 and "did not come within 20 s in message 7" in told[0]
    launched.assert_no_orphan()


def test_a_shard_that_is_stopped_is_named_and_killed(launch):
    shard = "if RANK == 1: serve_shard(); sleep()\n" + GIVES_UP
    launched = launch(shard=shard, num_shards=2)
    launched.wait_for_line("Ready on")
    os.kill(launched.wait_for_child("shard-1"), signal.SIGSTOP)
    (launched.folder / "give_up").touch()
    begun = time.monotonic()
    code, lines = launched.end()
    assert code == 1
    assert time.monotonic() - begun < 6
    [last] = errors(lines)
    assert last == lines[-1]
    assert last.endswith(
        "shard 0 ended because another shard failed (exit code 3) while serving: shard 1 did not "
        "come within 20 s in message 7 (shard 1 is stopped, as by SIGSTOP)"
    )
    launched.assert_no_orphan()


def test_of_ranks_that_say_the_same_one_is_enough(launch):
    shard = "log('ERROR', 'num_shard 3 can not split this model'); sys.exit(1)"
    code, lines = launch(shard=shard, num_shards=3).end()
    assert code == 1
    assert sum("can not split" in line for line in lines) == 1
    # Any rank may be the first.
    assert re.search(
        r"shard [0-2] failed with exit code 1: num_shard 3 can not split this model$", lines[-1]
    )


def test_the_first_of_several_last_errors_is_not_lost(launch):
    shard = "log('INFO', 'a'); log('ERROR', 'the cause'); log('ERROR', 'the end'); sys.exit(1)"
    _, lines = launch(shard=shard, num_shards=1).end()
    assert lines[-2:] == ["  the cause", "  the end"]


def test_says_what_each_rank_is_doing(launch):
    shard = """
if RANK == 1: serve_shard(); sleep()
log("INFO", f"loading weights: {40 - RANK} of 80 tensors"); sleep()
"""
    router = """
[given] = [one for one in sys.argv if one.startswith("--progress-fd=")]
lines = open(int(given.partition("=")[2]))
while "38 of 80" not in (line := next(lines)) or "40 of 80" not in line: pass
log("INFO", "the router has read: " + line.strip()); sleep()
"""
    launched = launch(shard=shard, router=router, num_shards=3)
    launched.wait_for_line("the router has read: shard 0: loading weights: 40 of 80 tensors; shard")
    said = (
        "Waiting for shard 0 to be ready: loading weights: 40 of 80 tensors; "
        "shard 2 to be ready: loading weights: 38 of 80 tensors"
    )
    launched.wait_for_line(said)


def test_a_batch_that_has_lost_its_shard_is_not_to_blame(launch):
    """It notices the closed socket before the process has ended."""
    shard = """
serve_shard()
while not (FOLDER / "batch.pid").exists(): time.sleep(0.01)
if RANK == 0: sleep()
time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)
"""
    batch = "begin('batch'); time.sleep(0.1); os._exit(1)"
    launched = launch(shard=shard, router=batch, num_shards=2, mode="batch", json_output=True)
    code, lines = launched.end()
    assert code == 1
    assert "shard 1 was killed by signal 9" in json.loads(lines[-1])["message"]
    launched.assert_no_orphan()


def test_json_lines_say_the_rank(launch):
    launched = launch(shard="log('INFO', 'hello'); sleep()", num_shards=2, json_output=True)
    for _ in range(2):
        launched.wait_for_line("hello")
    records = [json.loads(line) for line in launched.lines if "hello" in line]
    assert sorted(record["rank"] for record in records) == [0, 1]
