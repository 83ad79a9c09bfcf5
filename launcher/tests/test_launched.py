"""A real launcher with small scripts as children: processes, signals, pipes and sockets.

All else of a launcher's life has played children: test_supervisor.py.
"""

import ctypes
import json
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from text_generation_launcher.ports import AddressError, PortClaim
from text_generation_launcher.sockets import SocketClaim

from launcher.tests.conftest import wait_until

DOWNLOAD = """
pid_file("download")
log("INFO", "downloading model.safetensors: 1.2 of 4.9 GB")
print(json.dumps({"model_path": "/models/downloaded"}))
"""


def test_a_server_from_its_download_to_its_end(launch, free_port):
    """Meanwhile no other launcher gets its port and its sockets; nothing is left."""
    grandchild = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "(FOLDER / 'grandchild.pid').write_text(str(child.pid))\n"
    )
    launched = launch(download=DOWNLOAD, shard=grandchild + "serve_shard(); sleep()")
    launched.wait_for_child("download")
    ready = launched.wait_for_line("Ready on")
    assert f"try: curl http://127.0.0.1:{free_port}/generate " in ready
    with pytest.raises(AddressError, match=f"port {free_port} on 127.0.0.1 is already in use"):
        PortClaim("127.0.0.1", free_port, "--port")
    with pytest.raises(AddressError, match="another server uses the shard sockets"):
        SocketClaim(str(launched.folder / "shard"), 1)
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
    PortClaim("127.0.0.1", free_port, "--port").close()


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
        PortClaim("localhost", port, "--master-port", "--master-addr")
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 0
    trace = launched.trace()
    assert trace[-4] == "router got SIGTERM"
    assert sorted(trace[-3:]) == [f"{name} got SIGTERM" for name in ("shard", "shard-1", "shard-2")]
    assert not list(tmp_path.glob("shard-[0-9]"))
    launched.assert_no_orphan()


def test_no_orphan_survives_a_killed_launcher(launch):
    script = "be_stubborn(); pid_file('shard'); sleep()"
    launched = launch(shard=script, router=script.replace("shard", "router"))
    for name in ("shard", "router"):
        launched.wait_for_child(name)
    launched.process.kill()
    launched.process.wait()
    launched.assert_no_orphan()


def test_an_adopted_orphan_does_not_stay_as_a_zombie(launch):
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


def test_it_serves_after_the_reader_of_its_log_is_gone(launch):
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


def test_shards_end_with_the_program_that_started_them(launch):
    launched = launch(mode="shards", json_output=True, stdin=subprocess.PIPE)
    assert "model_path" in json.loads(launched.wait_for_line("model_path"))
    launched.process.stdin.write("only the end counts\n")
    launched.process.stdin.close()
    code, lines = launched.end()
    assert code == 0, lines
    launched.assert_no_orphan()


def test_a_router_whose_event_loop_is_blocked_is_the_end(launch):
    """It has reported once, answers, and reports no more. The router is told what shards do."""
    router = """
[given] = [one for one in sys.argv if one.startswith("--progress-fd=")]
line = next(open(int(given.partition("=")[2])))
log("INFO", "the router has read: " + line.strip())
beat(); serve_router()
"""
    shard = "log('INFO', 'loading weights: 1 of 2'); wait_for('router.pid'); serve_shard(); sleep()"
    launched = launch(router=router, shard=shard, silences_s=(60.0, 0.4))
    code, lines = launched.end()
    assert code == 1
    assert any("the router has read: shard 0: loading weights: 1 of 2" in line for line in lines)
    assert lines[-1].endswith("the router has not answered for 0.4 s") and " ERROR " in lines[-1]
    launched.assert_no_orphan()
