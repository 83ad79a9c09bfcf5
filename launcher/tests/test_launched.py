"""A real launcher with small scripts as children: processes, signals, pipes and sockets.

All else of a launcher's life has played children: test_supervisor.py.
"""

import ctypes
import signal
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
