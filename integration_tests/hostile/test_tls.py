"""TLS from the launcher's flags to the client, a new certificate while it serves included."""

import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from integration_tests.server import LauncherHandle, wait_until


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@contextmanager
def encrypted(certificate: Path, key: Path) -> Iterator[LauncherHandle]:
    """A launcher that speaks TLS, and a client that trusts its certificate."""
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    handle = LauncherHandle(None, *flags)
    try:
        handle.client.close()
        handle.url = handle.url.replace("http:", "https:")
        handle.client = trusting(handle, certificate)
        wait_until(lambda: "Ready on" in handle.log or handle.process.poll() is not None, 90, "up")
        assert f"Ready on {handle.url}" in handle.log, handle.log
        yield handle
        handle.stop()
    finally:
        handle.kill()


def trusting(handle: LauncherHandle, certificate: Path) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificate))
    return httpx.Client(base_url=handle.url, verify=context, timeout=60, trust_env=False)


def test_tls(tmp_path: Path) -> None:
    certificate, key = make(tmp_path, "first")
    old = ssl.create_default_context(cafile=str(certificate))
    with encrypted(certificate, key) as handle:
        assert f"curl --insecure {handle.url}/generate" in handle.log
        assert handle.generate("the cat", max_new_tokens=5)["generated_text"]
        body = {"inputs": "the cat", "parameters": {"max_new_tokens": 5}}
        answer = handle.client.post("/generate_stream", json=body).text
        assert answer.count("data:") == 5

        # A stream that began with the old certificate goes on while the files change.
        more = {"inputs": "n", "parameters": {"max_new_tokens": 200, "ignore_eos_token": True}}
        with handle.client.stream("POST", "/generate_stream", json=more) as response:
            lines = response.iter_lines()
            next(lines)
            second, second_key = make(tmp_path, "second")
            os.replace(second_key, key)
            os.replace(second, certificate)
            wait_until(lambda: "The new certificate is in use" in handle.log, 20, "it is read")
            assert sum(line.startswith("data:") for line in lines) == 199
        with trusting(handle, certificate) as client:
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.ConnectError), httpx.Client(verify=old) as client:
            client.get(f"{handle.url}/health")

        certificate.write_text("no certificate")
        wait_until(lambda: "stays in use" in handle.log, 20, "the bad file is seen")
        assert handle.metrics()["tgi_request_count"] == 3
        check_unread_answers_are_cut(handle)


def check_unread_answers_are_cut(handle: LauncherHandle) -> None:
    """The limits hold with TLS as well."""
    body = b'{"inputs": "' + b"What is it? " * 10_000 + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.socket() as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.connect(("127.0.0.1", handle.port))
        with context.wrap_socket(bare) as client:
            client.settimeout(30)
            client.sendall((head + body) * 4)
            began = time.monotonic()
            reason = 'tgi_connections_refused{reason="unread"}'
            wait_until(lambda: handle.metrics()[reason] == 1, 60, "it is cut off")
            assert time.monotonic() - began > 25


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    certificate, key = make(tmp_path, "one")
    _, other_key = make(tmp_path, "other")
    cases = {
        ("--ssl-certfile", str(certificate)): "belong together: give both or neither",
        ("--ssl-certfile", "/none", "--ssl-keyfile", str(key)): "is not a file that can be read",
        ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(other_key)): "key values",
        ("--ssl-certfile", str(key), "--ssl-keyfile", str(key)): "give a PEM certificate",
    }
    for flags, sentence in cases.items():
        handle = LauncherHandle(None, *flags)
        try:
            assert handle.wait_for_exit() == 1
            errors = [line for line in handle.log.splitlines() if "ERROR" in line]
            assert sentence in errors[-1], handle.log
            assert "Traceback" not in handle.log
        finally:
            handle.kill()
