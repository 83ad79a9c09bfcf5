import errno
import os
import socket

import pytest
from text_generation_launcher import ports
from text_generation_launcher.ports import PortClaim
from text_generation_process.sockets import AddressError


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

    monkeypatch.setattr(ports, "bind_port", refuse)
    with pytest.raises(AddressError, match=expected):
        PortClaim("h", 80, "--port")
