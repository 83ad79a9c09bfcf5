import socket

import pytest
from text_generation_process.sockets import bind_port


def test_a_bound_port_can_be_listened_on() -> None:
    with bind_port("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        bound.listen()
        with socket.create_connection(bound.getsockname()):
            pass


def test_a_name_with_both_versions_prefers_version_4(monkeypatch: pytest.MonkeyPatch) -> None:
    version_6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    version_4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [version_6, version_4])
    with bind_port("both", 0, prefers_ipv4=True) as bound:
        assert bound.family is socket.AF_INET
