"""Other users of the machine and the shards' sockets. The tests play another user: they are root's,
as CI is."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, free_port, has_ended, wait_until

NOBODY = 65534
# Python itself may be in root's home, where another user can not read it: so it is begun by root.
BECOME_NOBODY = f"import os, socket, sys; os.setgid({NOBODY}); os.setuid({NOBODY})\n"


@pytest.fixture(autouse=True)
def is_root() -> None:
    if os.geteuid() != 0:
        pytest.fail("these tests play another user of the machine: run them as root, as CI does")


@contextmanager
def as_nobody(script: str) -> Iterator["subprocess.Popen[str]"]:
    """Another user's program, which has printed a line and runs until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", BECOME_NOBODY + script + "\nprint('there', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
        process.kill()


def can_connect(path: str) -> bool:
    """Whether another user can."""
    script = f"sys.exit(socket.socket(socket.AF_UNIX).connect_ex({path!r}))"
    return subprocess.run([sys.executable, "-c", BECOME_NOBODY + script]).returncode == 0


@pytest.fixture
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder like /tmp: every user may write there, and remove only their own files."""
    folder = Path(f"/tmp/pytgi-test-{os.getpid()}")
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def open_socket(handle: LauncherHandle) -> Path:
    """Where the shard listens, from its command line."""
    arguments = [argument for child in handle.family() for argument in child.cmdline()]
    (prefix,) = {a.partition("=")[2] for a in arguments if a.startswith("--uds-path=")}
    return Path(f"{prefix}-0")


def test_by_default_nobody_else_comes_near(launch: Launch, tiny_model_path: Path) -> None:
    permissive = {"in_child": lambda: os.umask(0), "chooses_sockets": False, "TMPDIR": "/tmp"}
    handle = launch(tiny_model_path, **permissive)
    handle.wait_until_ready()
    path = open_socket(handle)
    assert path.name == "text-generation-server-0"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not can_connect(str(path))
    assert handle.generate("the cat sat on ", max_new_tokens=2)["generated_text"]
    handle.stop()
    assert not path.parent.exists()


def test_a_killed_launcher_leaves_nothing_behind_the_next(
    launch: Launch, tiny_model_path: Path
) -> None:
    handle = launch(tiny_model_path, chooses_sockets=False, TMPDIR="/tmp")
    handle.wait_until_ready()
    folder = open_socket(handle).parent
    family = handle.family()
    handle.process.kill()
    wait_until(lambda: all(map(has_ended, family)), 20, "its children end with it")
    assert folder.exists()
    again = launch(tiny_model_path, chooses_sockets=False, TMPDIR="/tmp")
    wait_until(lambda: not folder.exists(), 20, "the next one removes what it left")
    again.wait_until_ready()
    again.stop()


def test_a_socket_that_was_chosen_is_ours_alone(
    launch: Launch, tiny_model_path: Path, shared_folder: Path
) -> None:
    flags = ("--shard-uds-path", str(shared_folder / "s"))
    handle = launch(tiny_model_path, *flags, in_child=lambda: os.umask(0))
    handle.wait_until_ready()
    assert stat.S_IMODE((shared_folder / "s-0").stat().st_mode) == 0o600
    assert not can_connect(str(shared_folder / "s-0"))
    handle.stop()


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "alive"])
def test_another_users_socket_in_our_place(
    launch: Launch, tiny_model_path: Path, shared_folder: Path, is_dead: bool
) -> None:
    path = f"{shared_folder}/s-0"
    listen = "" if is_dead else "s.listen()"
    with as_nobody(f"s = socket.socket(socket.AF_UNIX); s.bind({path!r}); {listen}"):
        handle = launch(tiny_model_path, "--shard-uds-path", str(shared_folder / "s"))
        assert handle.wait_for_exit() == 1
    (error,) = [line for line in handle.log.splitlines() if " ERROR " in line]
    assert f"{path} belongs to user {NOBODY}, and this process runs as user 0: choose" in error
    assert "Traceback" not in handle.log
    assert Path(path).exists()


def test_a_stranger_who_binds_the_path_before_the_shard(
    launch: Launch, tiny_model_path: Path, shared_folder: Path
) -> None:
    """The launcher has looked, and the shard has not begun to listen: what nobody reads there was
    said Ready about, and prompts were sent to it."""
    handle = launch(tiny_model_path, "--shard-uds-path", str(shared_folder / "s"))
    path = str(shared_folder / "s-0")
    lock = shared_folder / "s.lock"
    wait_until(lambda: lock.exists() and len(handle.family()) > 0, 20, "the launcher has looked")
    script = (
        f"s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen()\n"
        f"os.chmod({path!r}, 0o777)"
    )
    with as_nobody(script):
        assert handle.wait_for_exit() == 1
    assert f"{path} is a socket of user {NOBODY}" in handle.log
    assert "Ready on" not in handle.log
    assert "Traceback" not in handle.log


def test_a_stranger_who_takes_the_path_later_gets_nothing(
    launch: Launch, tiny_model_path: Path, shared_folder: Path
) -> None:
    """Even if that user can remove our socket: the router only uses the socket that it checked."""
    handle = launch(tiny_model_path, "--shard-uds-path", str(shared_folder / "s"), "--no-restart")
    handle.wait_until_ready()
    path = shared_folder / "s-0"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        stranger.setblocking(False)
        assert handle.generate("the cat sat on ", max_new_tokens=2)["generated_text"]
        handle.child("text-generation-server").send_signal(signal.SIGKILL)
        body = {"inputs": "the cat sat on ", "parameters": {"max_new_tokens": 2}}
        with suppress(httpx.TransportError):  # the server may have ended already
            assert handle.client.post("/generate", json=body).status_code >= 400
        assert handle.wait_for_exit() == 1
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_a_name_that_another_user_holds(launch: Launch, tiny_model_path: Path) -> None:
    """Any user can bind the name by which launchers avoid the same port: it is not mistaken for a
    launcher."""
    port = free_port()
    name = f"text-generation-launcher:127.0.0.1:{port}"
    bind = f"s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}')"
    with as_nobody(bind):
        handle = launch(tiny_model_path, "--port", str(port))
        assert handle.wait_for_exit() == 1
    (error,) = [line for line in handle.log.splitlines() if " ERROR " in line]
    assert f"some program of this machine, holds the socket name @{name}" in error
