import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from text_generation_launcher import address
from text_generation_launcher.address import AddressError, SocketClaim, claim_port


def test_a_free_port(free_port):
    claim_port("127.0.0.1", free_port, "--port").close()
    claim_port("localhost", free_port, "--port").close()


def test_a_port_that_another_launcher_is_going_to_use(free_port):
    claim = claim_port("127.0.0.1", free_port, "--port")
    with pytest.raises(AddressError, match=f"port {free_port} on 127.0.0.1 is already in use"):
        claim_port("127.0.0.1", free_port, "--port")
    claim_port("127.0.0.2", free_port, "--port").close()
    claim.close()
    claim_port("127.0.0.1", free_port, "--port").close()


def test_a_port_whose_last_connections_are_still_closing(free_port):
    """A server can start directly after another one has ended."""
    with socket.create_server(("127.0.0.1", free_port)) as server:
        client = socket.create_connection(("127.0.0.1", free_port))
        connection, _ = server.accept()
        connection.close()  # closes first, so that its side waits
        assert client.recv(1) == b""
        client.close()
    claim_port("127.0.0.1", free_port, "--port").close()


def test_a_port_in_use_names_the_flag(free_port):
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(AddressError, match="already in use: choose another with --prometheus-port"),
    ):
        claim_port("127.0.0.1", free_port, "--prometheus-port")


@pytest.mark.parametrize("hostname", ["no.such.name.invalid", "192.0.2.1"])
def test_an_address_of_another_machine(hostname, free_port):
    with pytest.raises(AddressError, match="is not an address of this machine"):
        claim_port(hostname, free_port, "--port")


@pytest.mark.parametrize(
    "number, expected",
    [(errno.EACCES, "port 80 needs privileges"), (errno.ENOBUFS, "cannot listen on h port 80")],
)
def test_other_refusals_of_the_system(number, expected):
    error = OSError(number, os.strerror(number))
    assert expected in address._why_not(error, "h", 80, "--port", "--hostname")


def test_a_socket_path_that_is_too_long(tmp_path: Path):
    fits = str(tmp_path / "x").ljust(address.MAX_SOCKET_PATH_BYTES - 2, "x")
    SocketClaim(fits, 1).close()
    with pytest.raises(AddressError, match="takes 108 bytes, and a unix socket path has at most"):
        SocketClaim(fits + "x", 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(fits + "-0")  # the limit is the system's, not one byte less


def test_a_folder_that_does_not_exist():
    with pytest.raises(AddressError, match=r"cannot write /nowhere/s.lock: No such file"):
        SocketClaim("/nowhere/s", 1)


def test_a_stale_socket_is_removed(tmp_path: Path):
    path = tmp_path / "s-0"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    assert path.exists()
    SocketClaim(str(tmp_path / "s"), 1).close()
    assert not path.exists()


def test_a_live_socket_is_not(tmp_path: Path):
    path = tmp_path / "s-0"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(AddressError, match="another server uses the shard sockets"):
            SocketClaim(str(tmp_path / "s"), 1)
    assert path.exists()


def test_a_file_of_someone_is_not_removed(tmp_path: Path):
    path = tmp_path / "s-0"
    path.write_text("precious")
    with pytest.raises(AddressError, match="exists and is not a socket"):
        SocketClaim(str(tmp_path / "s"), 1)
    assert path.read_text() == "precious"


def test_the_claim_ends_with_its_launcher(tmp_path: Path):
    prefix = str(tmp_path / "s")
    script = (
        "from text_generation_launcher.address import SocketClaim\n"
        f"claim = SocketClaim({prefix!r}, 1); print('claimed', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(AddressError, match="another server uses the shard sockets"):
            SocketClaim(prefix, 1)
        other.kill()
    SocketClaim(prefix, 1).close()
