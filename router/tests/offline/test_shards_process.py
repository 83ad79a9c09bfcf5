"""A launcher of one's own, played by small scripts."""

import logging
import sys
import time

import pytest
from text_generation_router.offline import shards_process
from text_generation_router.offline.shards_process import (
    ShardsProcess,
    ShardsProcessError,
)

PRELUDE = """
import json, signal, sys, time
def log(level, message):
    print(json.dumps(dict(timestamp="T", level=level, target="child", message=message)), flush=True)
def ready():
    answer = dict(model_id="a/b", model_path="/m", master_shard_uds_path="/run/s-0")
    print(json.dumps(answer), flush=True)
def wait():
    sys.stdin.read()
"""


@pytest.fixture
def start(monkeypatch):
    started = []

    def start(script, *flags):
        command = (sys.executable, "-c", PRELUDE + script)
        monkeypatch.setattr(shards_process, "_launcher", lambda: command)
        started.append(ShardsProcess(flags))
        return started[-1]

    yield start
    for process in started:
        process.close()


def wait_until_ended(process):
    """Fails if it does not end by itself."""
    deadline = time.monotonic() + 10
    while process.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "script, expected",
    [
        ("log('INFO', 'x'); log('ERROR', 'no such model'); sys.exit(1)", "^no such model$"),
        ("sys.stderr.write('launcher: error: unknown flag\\n'); sys.exit(2)", "unknown flag"),
        ("sys.exit(0)", "printed nothing"),
    ],
)
def test_why_it_did_not_start(start, script, expected):
    with pytest.raises(ShardsProcessError, match=expected):
        start(script).wait_until_ready()


def test_the_log_goes_to_logging(start, caplog):
    caplog.set_level(logging.DEBUG)
    process = start(
        "log('INFO', 'loading'); log('WARN', 'slow'); ready(); "
        "log('ERROR', 'a step failed'); sys.exit(1)"
    )
    process.wait_until_ready()
    wait_until_ended(process)
    process.close()
    said = [(r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name == "child"]
    assert said == [
        ("child", "INFO", "loading"),
        ("child", "WARNING", "slow"),
        ("child", "ERROR", "a step failed"),
    ]
    assert process.last_words() == "a step failed"
