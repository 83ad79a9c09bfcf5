"""Shards alone, and batches: the modes without HTTP."""

import json
import os
import signal
import subprocess

import pytest

BATCH = "begin('batch'); note('batch started with ' + sys.argv[1]); "


def test_shards_alone_say_where_they_are(launch, tmp_path):
    launched = launch(mode="shards", json_output=True, stdin=subprocess.PIPE)
    ready = json.loads(launched.wait_for_line("Ready on unix:"))
    assert "text-generation-benchmark --master-shard-uds-path" in ready["message"]
    answer = json.loads(launched.wait_for_line("model_path"))
    assert answer == {
        "model_id": "pytgi/embedded",
        "model_path": "/models/some",
        "master_shard_uds_path": f"{tmp_path}/shard-0",
    }
    launched.process.send_signal(signal.SIGTERM)
    code, _ = launched.end()
    assert code == 0
    assert launched.trace() == ["shard started with /models/some", "shard got SIGTERM"]
    launched.assert_no_orphan()


def test_people_are_not_shown_what_programs_read(launch):
    launched = launch(mode="shards", stdin=subprocess.PIPE)
    launched.wait_for_line("Ready on unix:")
    launched.process.send_signal(signal.SIGTERM)
    assert not any("model_path" in line for line in launched.end()[1])


@pytest.mark.parametrize("shard", ["serve_shard(); sleep()", "begin('shard'); sleep()"])
def test_shards_end_with_whoever_started_them(launch, shard):
    launched = launch(mode="shards", shard=shard, stdin=subprocess.PIPE)
    launched.wait_for_child("shard")
    launched.process.stdin.write("only the end counts\n")
    launched.process.stdin.close()
    code, lines = launched.end()
    assert code == 0, lines
    launched.assert_no_orphan()


def test_a_shard_that_dies_ends_the_launcher(launch):
    launched = launch(mode="shards", stdin=subprocess.PIPE)
    launched.wait_for_line("Ready on unix:")
    os.kill(launched.wait_for_child("shard"), signal.SIGKILL)
    code, lines = launched.end()
    assert code == 1
    assert any("shard 0 was killed by signal 9" in line for line in lines)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_batch_decides_what_the_launcher_exits_with(launch, code):
    launched = launch(mode="batch", router=BATCH + f"os._exit({code})")
    assert launched.end()[0] == code
    assert launched.trace() == [
        "shard started with /models/some",
        "batch started with /models/some",
        "shard got SIGTERM",
    ]
    launched.assert_no_orphan()


def test_a_batch_that_was_killed_is_a_failure(launch):
    launched = launch(mode="batch", router=BATCH + "os.kill(os.getpid(), signal.SIGKILL)")
    code, lines = launched.end()
    assert code == 1
    assert any("the router was killed by signal 9" in line for line in lines)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_batch_has_not_succeeded(launch, stop):
    launched = launch(mode="batch", router=BATCH + "sleep()")
    launched.wait_for_child("batch")
    launched.process.send_signal(stop)
    assert launched.end()[0] == 128 + stop
    assert launched.trace()[2:] == ["batch got SIGTERM", "shard got SIGTERM"]
    launched.assert_no_orphan()


def test_a_shard_that_dies_ends_the_batch(launch):
    launched = launch(mode="batch", router=BATCH + "sleep()")
    launched.wait_for_child("batch")
    os.kill(launched.wait_for_child("shard"), signal.SIGKILL)
    code, lines = launched.end()
    assert code == 1
    assert any("shard 0 was killed by signal 9" in line for line in lines)
    launched.assert_no_orphan()


def test_a_batch_draws_on_the_standard_error_of_the_launcher(launch):
    router = BATCH + "sys.stderr.write('half a bar'); sys.stderr.flush(); os._exit(0)"
    launched = launch(mode="batch", router=router, stderr=subprocess.PIPE)
    assert launched.end()[0] == 0
    assert launched.process.stderr.read() == "half a bar"
    launched.process.stderr.close()
