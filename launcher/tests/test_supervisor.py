import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.log import Log
from text_generation_launcher.option import Mode
from text_generation_launcher.ports import AddressError, claim_port
from text_generation_launcher.process import (
    RECENT_LINES,
    Command,
    ManagedProcess,
    ProcessError,
)
from text_generation_launcher.sockets import SocketClaim
from text_generation_launcher.supervisor import Supervisor

from launcher.tests.conftest import wait_until

DOWNLOAD = """
pid_file("download")
log("INFO", "downloading model.safetensors: 1.2 of 4.9 GB")
print(json.dumps({"model_path": "/models/downloaded"}))
"""


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if " ERROR " in line]


def test_starts_the_children_and_stops_them_router_first(launch, free_port):
    launched = launch(download=DOWNLOAD)
    ready = launched.wait_for_line("Ready on")
    assert f"Ready on http://127.0.0.1:{free_port} after " in ready
    assert f"try: curl http://127.0.0.1:{free_port}/generate " in ready
    launched.process.send_signal(signal.SIGTERM)
    code, lines = launched.end()
    assert code == 0
    # The router loads at the same time as the shard, so either may be first.
    trace = launched.trace()
    assert [*sorted(trace[:2], reverse=True), *trace[2:]] == [
        "shard started with /models/downloaded",
        "router started with /models/downloaded",
        "router got SIGTERM",
        "shard got SIGTERM",
    ]
    assert any("T  INFO child: downloading model.safetensors: 1.2 of 4.9 GB" in x for x in lines)
    assert not any("model_path" in line for line in lines)
    assert not (launched.folder / "shard-0").exists()
    launched.assert_no_orphan()


def test_a_known_model_needs_no_download(launch):
    launched = launch()
    launched.wait_for_line("Ready on")
    assert "shard started with /models/some" in launched.trace()[:2]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    "state, scripts",
    [
        ("download", {"download": "pid_file('download'); sleep()"}),
        ("shard", {"shard": "begin('shard'); sleep()"}),
        ("router", {"router": "begin('router'); sleep()"}),
    ],
)
def test_a_signal_while_starting_ends_everything_with_0(launch, state, scripts, stop):
    launched = launch(**scripts)
    launched.wait_for_child(state)
    launched.process.send_signal(stop)
    code, lines = launched.end()
    assert code == 0, lines
    assert errors(lines) == []
    launched.assert_no_orphan()


def test_hangup_is_ignored_under_nohup(launch):
    launched = launch(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launched.wait_for_line("Ready on")
    launched.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        launched.process.wait(0.2)
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 0


def test_a_child_that_ignores_sigterm_is_killed_after_the_timeout(launch):
    launched = launch(shard="serve_shard(); be_stubborn(); sleep()", timeout_s=0.2)
    launched.wait_for_line("Ready on")
    launched.process.send_signal(signal.SIGTERM)
    code, lines = launched.end()
    assert code == 0
    assert any("shard 0 did not stop within 0.2 s: killing it" in line for line in lines)
    launched.assert_no_orphan()


def test_a_second_signal_kills_at_once_with_1(launch):
    launched = launch(shard="serve_shard(); be_stubborn(); sleep()", timeout_s=600)
    launched.wait_for_line("Ready on")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for_line("received SIGINT: stopping")
    launched.process.send_signal(signal.SIGINT)
    code, lines = launched.end()
    assert code == 1
    assert "killing everything" in lines[-1]
    launched.assert_no_orphan()


@pytest.mark.parametrize(
    "state, scripts",
    [
        ("download", {"download": "be_stubborn(); pid_file('download'); sleep()"}),
        ("shard", {"shard": "be_stubborn(); pid_file('shard'); sleep()"}),
        ("router", {"shard": "serve_shard(); be_stubborn(); sleep()"}),
    ],
)
def test_no_orphan_survives_a_killed_launcher(launch, state, scripts):
    launched = launch(**scripts)
    launched.wait_for_child(state)
    launched.process.kill()
    launched.process.wait()
    launched.assert_no_orphan()


def test_a_sentence_of_a_child_is_the_one_error_line(launch):
    launched = launch(shard="log('INFO', 'hello'); log('ERROR', 'no such weights'); sys.exit(1)")
    code, lines = launched.end()
    assert code == 1
    assert len(errors(lines)) == 1
    assert errors(lines)[0].endswith(
        "text_generation_launcher: shard 0 failed with exit code 1: no such weights"
    )
    assert any(line.endswith("INFO child: hello") for line in lines)


def test_an_error_that_is_not_the_last_word_is_logged_in_its_place(launch):
    launched = launch(shard="log('ERROR', 'first'); log('INFO', 'then'); serve_shard(); sleep()")
    launched.wait_for_line("Ready on")
    said = [line.rsplit(": ", 1)[1] for line in launched.lines if " child: " in line]
    assert said == ["first", "then"]


def test_an_error_is_logged_at_once_while_serving(launch):
    router = """
import threading
def fail():
    wait_for("is_ready")
    log("ERROR", "a step failed")
log("ERROR", "slow start")
threading.Thread(target=fail, daemon=True).start()
serve_router()
"""
    launched = launch(router=router)
    launched.wait_for_line("Ready on")
    # Lines of a child and of the launcher may be in any order.
    if not any("slow start" in line for line in launched.lines):
        launched.wait_for_line("slow start")
    (launched.folder / "is_ready").touch()
    launched.wait_for_line("a step failed")


def test_the_last_error_alone_is_reported_while_serving(launch):
    shard = "serve_shard(); wait_for('is_ready'); log('INFO', 'a'); log('ERROR', 'b'); sys.exit(1)"
    launched = launch(shard=shard)
    launched.wait_for_line("Ready on")
    (launched.folder / "is_ready").touch()
    _, lines = launched.end()
    assert errors(lines)[-1].endswith("shard 0 failed with exit code 1 while serving: b")
    assert sum(line.endswith("ERROR child: b") for line in lines) == 1


def test_plain_last_words_are_limited_and_kept_in_order(launch):
    launched = launch(shard="for n in range(50): print('line', n)\nsys.exit(3)")
    code, lines = launched.end()
    assert code == 1
    start = next(n for n, line in enumerate(lines) if " ERROR " in line)
    assert "shard 0 failed with exit code 3; its last lines:" in lines[start]
    assert lines[start + 1 :] == [f"  line {n}" for n in range(50 - RECENT_LINES, 50)]


def test_a_child_that_ends_with_0_is_a_failure_as_well(launch):
    code, lines = launch(shard="sys.exit(0)").end()
    assert code == 1
    assert "shard 0 ended unexpectedly with exit code 0 and printed nothing" in lines[-1]


def test_the_router_dying_ends_the_shard(launch):
    launched = launch()
    launched.wait_for_line("Ready on")
    os.kill(launched.wait_for_child("router"), signal.SIGKILL)
    code, lines = launched.end()
    assert code == 1
    assert "the router was killed by signal 9" in errors(lines)[0]
    assert "while serving" in errors(lines)[0]
    assert launched.trace()[-1] == "shard got SIGTERM"
    launched.assert_no_orphan()


def test_the_child_that_died_first_is_the_one_reported(launch):
    router = """
import threading
wait_for("shard.pid")
stat = Path("/proc", (FOLDER / "shard.pid").read_text(), "stat")
def watch():
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z": time.sleep(0.01)
    log("ERROR", "lost the shard"); os._exit(1)
threading.Thread(target=watch).start()
serve_router()
"""
    shard = "serve_shard(); wait_for('is_ready'); print('out of cheese', flush=True); os._exit(7)"
    launched = launch(shard=shard, router=router)
    launched.wait_for_line("Ready on")
    (launched.folder / "is_ready").touch()
    code, lines = launched.end()
    assert code == 1
    reported = [line for line in errors(lines) if "text_generation_launcher" in line]
    assert len(reported) == 1
    assert "shard 0 failed with exit code 7 while serving: out of cheese" in reported[0]


@pytest.mark.parametrize(
    "script, expected",
    [
        ("log('ERROR', 'no such repository'); sys.exit(1)", ": no such repository"),
        ("sys.exit(0)", "without the model's directory as its last line"),
        ("print(json.dumps({'model_path': 3}))", "without the model's directory"),
    ],
)
def test_a_failed_download(launch, script, expected):
    code, lines = launch(download=script).end()
    assert code == 1
    assert len(errors(lines)) == 1
    assert expected in errors(lines)[0]


def test_says_what_it_is_waiting_for(launch):
    launched = launch(shard="log('INFO', 'loading weights: 1 of 2'); sleep()")
    launched.wait_for_line("Waiting for shard 0 to be ready: loading weights: 1 of 2")


def test_json_output(launch):
    launched = launch(
        shard="log('WARNING', 'careful'); print('plain'); serve_shard(); sleep()",
        json_output=True,
    )
    launched.wait_for_line("Ready on")
    records = [json.loads(line) for line in launched.lines if "Waiting for" not in line]
    assert records[0] == {
        "timestamp": "T",
        "level": "WARN",
        "target": "child",
        "message": "careful",
    }
    assert records[1]["target"] == "shard 0"
    assert records[1]["message"] == "plain"


def test_goes_on_when_nobody_reads_its_log(launch):
    launched = launch(
        shard="serve_shard()\nwhile True: print('noise', flush=True); time.sleep(0.01)"
    )
    launched.wait_for_line("noise")
    launched.process.stdout.close()
    router = launched.wait_for_child("router")
    launched.process.stdout = None
    with pytest.raises(subprocess.TimeoutExpired):
        launched.process.wait(0.3)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(10) == 0
    assert router
    launched.assert_no_orphan()


def test_a_port_in_use_is_one_line_before_anything_starts(launch, free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        launched = launch()
        code, lines = launched.end()
    assert code == 1
    assert len(lines) == 1
    assert lines[0].endswith(
        f"port {free_port} on 127.0.0.1 is already in use: choose another with --port"
    )
    assert launched.trace() == []


def test_a_second_launcher_on_the_same_sockets_is_refused(launch, tmp_path):
    first = launch()
    first.wait_for_line("Ready on")
    with pytest.raises(AddressError, match="another server uses the shard sockets"):
        SocketClaim(str(tmp_path / "shard"), 1)
    assert (tmp_path / "shard-0").exists()


def test_a_signal_that_nobody_sent_stops_nothing(monkeypatch, tmp_path: Path):
    """After a stop that is longer than its wait CPython reports the signal 0."""
    config = LauncherConfig(
        download=None,
        model_path=tmp_path,
        shards=(),
        router=None,
        mode=Mode.SHARDS,
        shard_uds_path=str(tmp_path / "shard"),
        hostname="127.0.0.1",
        port=0,
        termination_timeout_s=1.0,
    )
    supervisor = Supervisor(config, Log("INFO", False))
    for number, expected in ((0, None), (signal.SIGCHLD, None), (signal.SIGTERM, signal.SIGTERM)):
        received = SimpleNamespace(si_signo=int(number))
        monkeypatch.setattr(signal, "sigtimedwait", lambda *_, received=received: received)
        assert supervisor._next_stop_signal(0.0) == expected


def test_what_a_child_started_ends_with_it(launch):
    grandchild = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "(FOLDER / 'grandchild.pid').write_text(str(child.pid))\n"
    )
    launched = launch(shard=grandchild + "serve_shard(); sleep()")
    launched.wait_for_line("Ready on")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    launched.wait_for_child("grandchild")
    launched.assert_no_orphan()


def test_what_is_left_to_the_launcher_does_not_stay_as_a_zombie(launch):
    """As the first process of a container it adopts all orphans."""
    orphan = (
        "import subprocess\n"
        "command = ['sh', '-c', 'sleep 0.3 >/dev/null & echo $!']\n"
        "pid = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout\n"
        "(FOLDER / 'orphan.pid').write_text(pid)\n"
    )
    launched = launch(
        shard=orphan + "serve_shard(); sleep()",
        preexec_fn=lambda: ctypes.CDLL(None).prctl(36, 1, 0, 0, 0),  # PR_SET_CHILD_SUBREAPER
    )
    launched.wait_for_line("Ready on")
    pid = launched.wait_for_child("orphan")
    stat = Path(f"/proc/{pid}/stat")
    parent = stat.read_text().rsplit(")", 1)[1].split()[1] if stat.exists() else None
    assert parent in (None, str(launched.process.pid))
    wait_until(lambda: not stat.exists())
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    launched.assert_no_orphan()


def test_a_second_launcher_that_starts_at_the_same_time_is_refused(launch, free_port):
    """Without the claim its router would fail only after the model is loaded."""
    first = launch(shard="begin('shard'); sleep()")
    first.wait_for_child("shard")
    with pytest.raises(AddressError, match=f"port {free_port} on 127.0.0.1 is already in use"):
        claim_port("127.0.0.1", free_port, "--port")
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 0
    claim_port("127.0.0.1", free_port, "--port").close()


def test_a_closed_standard_output(tmp_path: Path):
    """`>&-`: no pipe of a child may get the descriptor of the log."""
    script = (
        "import os, sys; os.close(1); os.close(0)\n"
        "from text_generation_launcher.cli import main\n"
        f"code = main(['--model-id', {str(tmp_path)!r}, '--quantize', 'awq'])\n"
        "sys.stderr.write(f'{code} {os.readlink(\"/proc/self/fd/1\")}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == "1 /dev/null"


def test_a_child_whose_launcher_is_already_dead_ends_itself():
    script = (
        "from text_generation_launcher import process; import ctypes\n"
        "process._bind_to_parent(ctypes.CDLL(None).prctl, parent=-1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL


def test_a_program_that_is_not_there():
    command = Command("shard 0", "shard", ("/nowhere/program",), {})
    with pytest.raises(ProcessError, match="cannot start shard 0: /nowhere/program: No such file"):
        ManagedProcess(command, print)
