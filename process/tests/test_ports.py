import socket

import pytest
from text_generation_process.ports import NameHeldError, bind_port, claim_port


def test_one_claim_for_each_owner_address_and_port() -> None:
    with bind_port("127.0.0.1", 0) as bound, claim_port("test-ports", bound):
        port = bound.getsockname()[1]
        with (
            bind_port("127.0.0.1", port) as second,
            pytest.raises(NameHeldError, match=f"test-ports:127.0.0.1:{port}"),
        ):
            claim_port("test-ports", second)
        with bind_port("127.0.0.1", port) as second:
            claim_port("another-owner", second).close()
        with bind_port("127.0.0.2", port) as second:
            claim_port("test-ports", second).close()
    with bind_port("127.0.0.1", port) as bound:
        claim_port("test-ports", bound).close()


def test_a_bound_port_can_be_listened_on() -> None:
    with bind_port("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        bound.listen()
        with socket.create_connection(bound.getsockname()):
            pass


def test_a_port_that_listens_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(OSError, match="Address already in use"),
    ):
        bind_port("127.0.0.1", server.getsockname()[1])


def test_a_name_with_both_versions_prefers_version_4(monkeypatch: pytest.MonkeyPatch) -> None:
    version_6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    version_4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [version_6, version_4])
    with bind_port("both", 0, prefers_ipv4=True) as bound:
        assert bound.family is socket.AF_INET
