import errno
import os
import socket

import pytest
from text_generation_launcher import ports
from text_generation_launcher.ports import AddressError, RendezvousPort, claim_port


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
    assert expected in ports._why_not(error, "h", 80, "--port", "--hostname")


def test_two_rendezvous_ports_are_never_one():
    one, other = RendezvousPort("localhost", None), RendezvousPort("localhost", None)
    assert one.number != other.number
    one.close()
    again = RendezvousPort("localhost", one.number)
    assert again.number == one.number
    with pytest.raises(AddressError, match=r"give --master-addr an IP address$"):
        RendezvousPort("no.such.host.invalid", None)
    with pytest.raises(
        AddressError, match=r"192\.0\.2\.1 is not an address of this machine: choose"
    ):
        RendezvousPort("192.0.2.1", None)
    for port in (again, other):
        port.close()
