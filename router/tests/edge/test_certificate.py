"""TLS: which files are taken, and what becomes of connections when they change."""

import asyncio
import os
import ssl
import subprocess
from pathlib import Path

import pytest
from text_generation_router.edge.certificate import Certificate

from router.tests.serving import serve


def make(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A certificate for the name, signed by itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-subj", f"/CN={name}", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *(more or ("-nodes",))], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    certificate, key = make(tmp_path, "first")
    return str(certificate), str(key)


def unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def shown(port: int) -> bytes:
    """The certificate that a new connection gets, which must be able to ask."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=unverified())
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(found, bytes)
    return found


def der(path: str | Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


async def test_files_that_are_no_pair_change_nothing(
    tmp_path: Path, files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(*files)
    async with serve(tmp_path, certificate=certificate) as server:
        first, key = der(files[0]), Path(files[1]).read_bytes()
        second, second_key = make(tmp_path, "second")
        os.replace(second, files[0])
        for _ in range(2):
            certificate.refresh()
            assert await shown(server.port) == first
        assert caplog.text.count("(key values mismatch)") == 1
        assert "the previous certificate stays in use" in caplog.text
        os.unlink(files[1])
        certificate.refresh()
        assert await shown(server.port) == first
        assert caplog.text.lower().count("no such file or directory") == 1
        Path(files[1]).write_bytes(key)
        certificate.refresh()
        assert await shown(server.port) == first
        os.replace(second_key, files[1])
        certificate.refresh()
        assert await shown(server.port) == der(files[0]) != first


async def test_old_versions_are_refused(tmp_path: Path, files: tuple[str, str]) -> None:
    async with serve(tmp_path, certificate=Certificate(*files)) as server:
        old = unverified()
        with pytest.warns(DeprecationWarning):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=old)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
