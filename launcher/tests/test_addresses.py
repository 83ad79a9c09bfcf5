"""Ports and sockets that no two launchers hold."""

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from text_generation_launcher import addresses
from text_generation_launcher.addresses import (
    PREFIX,
    PortClaim,
    PrivateFolder,
    SocketClaim,
    private_folder,
)
from text_generation_process.sockets import AddressError

NOBODY = 65534


def test_nobody_else_can_enter_and_nothing_is_left(tmp_path: Path):
    before = os.umask(0)
    try:
        folder = PrivateFolder(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    claim = SocketClaim(str(folder.path / "s"), 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(claim.paths[0])
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_one(tmp_path: Path):
    script = (
        "import os, socket; from pathlib import Path\n"
        "from text_generation_launcher.addresses import PrivateFolder\n"
        f"folder = PrivateFolder(Path({str(tmp_path)!r}))\n"
        "socket.socket(socket.AF_UNIX).bind(str(folder.path / 's-0')); os._exit(9)"
    )
    alive = PrivateFolder(tmp_path)
    (alive.path / "s-0").touch()
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    mine = PrivateFolder(tmp_path)
    assert {*tmp_path.iterdir()} == {alive.path, mine.path}
    alive.close()
    mine.close()


def test_other_files_and_folders_stay(tmp_path: Path):
    (tmp_path / f"{PREFIX}file").write_text("precious")
    (tmp_path / f"{PREFIX}folder" / "inner").mkdir(parents=True)
    (tmp_path / f"{PREFIX}new").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path)
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir()
    (theirs / "s-0").touch()
    os.chown(theirs, NOBODY, NOBODY)
    PrivateFolder(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 5 and list(theirs.iterdir())


def test_the_first_place_is_taken_that_no_other_user_can_change(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(addresses, "MAX_PATH_BYTES", 1000)
    runtime, other = tmp_path / "run", tmp_path / "tmp"
    runtime.mkdir(mode=0o700)
    other.mkdir()
    for mode, owner, expected in ((0o700, 0, runtime), (0o777, 0, other), (0o700, NOBODY, other)):
        os.chown(runtime, owner, owner)
        runtime.chmod(mode)
        folder = private_folder((runtime, other))
        assert folder.path.parent == expected
        folder.close()


def test_no_place_at_all_is_one_sentence(tmp_path: Path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(AddressError) as caught:
        private_folder((Path("/nowhere"), long, Path("/proc")))
    assert "/nowhere: No such file or directory" in str(caught.value)
    assert f"{long}: the path is too long for a unix socket" in str(caught.value)
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_in_which_others_can_replace_the_sockets(tmp_path: Path, mode: int):
    tmp_path.chmod(mode)
    with pytest.raises(AddressError, match="other users can replace the shards' sockets in "):
        SocketClaim(str(tmp_path / "s"), 1)
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o1777)  # as /tmp is
    SocketClaim(str(tmp_path / "s"), 1).close()
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(AddressError, match=f"belongs to user {NOBODY}, who could replace"):
        SocketClaim(str(tmp_path / "s"), 1)


@pytest.mark.parametrize(
    "kind, name, expected",
    [
        ("stale", "s-0", None),
        ("live", "s-0", "another server uses the shard sockets"),
        ("file", "s-0", "exists and is not a socket"),
        ("theirs", "s-0", f"s-0 belongs to user {NOBODY}, and this process runs as user 0"),
        ("theirs", "s.lock", f"s.lock belongs to user {NOBODY}, and this process runs as user 0"),
    ],
)
def test_only_a_stale_socket_of_the_same_user_is_removed(tmp_path: Path, kind, name, expected):
    path = tmp_path / name
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "file":
            path.touch()
        else:
            server.bind(str(path))
        if kind == "live":
            server.listen()
        if kind == "theirs":
            os.chown(path, NOBODY, NOBODY)
        if expected is None:
            server.close()
            SocketClaim(str(tmp_path / "s"), 1).close()
            assert not path.exists()
            return
        with pytest.raises(AddressError, match=expected):
            SocketClaim(str(tmp_path / "s"), 1)
    assert path.exists()


def test_a_socket_path_that_is_too_long(tmp_path: Path):
    fits = str(tmp_path / "x").ljust(addresses.MAX_PATH_BYTES - 2, "x")
    SocketClaim(fits, 1).close()
    with pytest.raises(AddressError, match="takes 108 bytes, and a unix socket path has at most"):
        SocketClaim(fits + "x", 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(fits + "-0")  # the limit is the system's, not one byte less


def test_a_port_whose_last_connections_are_still_closing(free_port):
    """A server can start directly after another one has ended."""
    with socket.create_server(("127.0.0.1", free_port)) as server:
        client = socket.create_connection(("127.0.0.1", free_port))
        connection, _ = server.accept()
        connection.close()  # closes first, so that its side waits
        assert client.recv(1) == b""
        client.close()
    PortClaim("127.0.0.1", free_port, "--port").close()


def test_a_port_in_use_names_the_flag(free_port):
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(AddressError, match="already in use: choose another with --prometheus-port"),
    ):
        PortClaim("127.0.0.1", free_port, "--prometheus-port")


@pytest.mark.parametrize(
    "hostname, expected",
    [
        ("no.such.name.invalid", "give --master-addr an IP address$"),
        ("192.0.2.1", r"192\.0\.2\.1 is not an address of this machine: choose"),
    ],
)
def test_an_address_of_another_machine(hostname, expected):
    with pytest.raises(AddressError, match=expected):
        PortClaim(hostname, None, "--master-port", "--master-addr")


@pytest.mark.parametrize(
    "number, expected",
    [(errno.EACCES, "port 80 needs privileges"), (errno.ENOBUFS, "cannot listen on h port 80")],
)
def test_other_refusals_of_the_system(number, expected, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(addresses, "bind_port", refuse)
    with pytest.raises(AddressError, match=expected):
        PortClaim("h", 80, "--port")
