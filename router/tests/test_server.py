"""The server around the application: its port, and how it ends: what runs may, nothing begins."""

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from text_generation_router import cli
from text_generation_router.config import RouterConfig
from text_generation_router.server import Certificate, bind, multiplied
from text_generation_router.services import Services, StartError
from text_generation_router.state import ServerState

from router.tests.scheduling import check_integrity
from router.tests.serving import ScriptedShards, assemble_scripted, serve

LONG = {"inputs": "n", "parameters": {"max_new_tokens": 4000}}


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Stopping:
    """A router that runs what `main` runs, on scripted shards."""

    def __init__(
        self, services: Services, client: httpx.AsyncClient, task: "asyncio.Task[int]"
    ) -> None:
        assert isinstance(services.shards, ScriptedShards)
        self.services = services
        self.shards = services.shards
        self.client = client
        self.task = task
        self.code: int | None = None

    async def stop(self) -> None:
        """Asks it to, and waits until it has heard."""
        os.kill(os.getpid(), signal.SIGTERM)
        while (await self.client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def until_it_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[Stopping]:
    """Serves inside the block, and until the server has ended by itself; then nothing is lost."""
    services = assemble_scripted(directory, hostname="127.0.0.1", port=0, **options)

    @asynccontextmanager
    async def start(
        config: RouterConfig, tracing: None, state: ServerState
    ) -> AsyncIterator[Services]:
        yield replace(services, state=state)

    ports: list[int] = []

    def told(hostname: str, port: int) -> socket.socket:
        listener = bind(hostname, port)
        ports.append(listener.getsockname()[1])
        return listener

    monkeypatch.setattr(cli, "start", start)
    monkeypatch.setattr(cli, "bind", told)
    serving = asyncio.create_task(cli.serve(services.config))
    await asyncio.sleep(0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", verify=False) as client:
        stopping = Stopping(services, client, serving)
        stopping.shards.delay_s = 0.02
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    break
            except httpx.ConnectError:
                pass
            await asyncio.sleep(0.02)
        yield stopping
        stopping.code = await asyncio.wait_for(serving, 10)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    check_integrity(services.batcher.planner)
    assert services.infer.free_permits == services.config.max_concurrent_requests


async def events_of(lines: AsyncIterator[str]) -> list[dict[str, Any]]:
    """The rest of a stream."""
    return [json.loads(line.removeprefix("data:")) async for line in lines if line]


async def test_late_requests_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"graceful_termination_timeout": 1.0}
    async with until_it_ends(tmp_path, monkeypatch, **options) as it:
        waiting = asyncio.create_task(it.client.post("/generate", json=LONG))
        async with it.client.stream("POST", "/generate_stream", json=LONG) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await it.stop()
            *_, last = await events_of(lines)
        assert last == {
            "error": "Incomplete generation stream",
            "error_type": "incomplete_generation_stream",
        }
        answer = await waiting
        assert answer.status_code == 500
        assert answer.json() == {
            "error": "Incomplete generation",
            "error_type": "incomplete_generation",
        }
    assert it.code == 0


async def test_a_client_that_does_not_read_delays_the_end_by_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with until_it_ends(tmp_path, monkeypatch) as it:
        it.shards.delay_s = 0.0
        body = {"inputs": "n", "parameters": {"max_new_tokens": 4000, "top_n_tokens": 5}}
        async with it.client.stream("POST", "/generate_stream", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await it.stop()
            os.kill(os.getpid(), signal.SIGTERM)
            began = asyncio.get_running_loop().time()
            while not it.task.done():
                await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() - began < 2
    assert it.code == 1


def test_several_connections_are_accepted_in_one_turn() -> None:
    async def count_turns(listener: socket.socket) -> int:
        made: list[asyncio.BaseTransport] = []

        class Taken(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(transport)

        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Taken, sock=one) for one in multiplied(listener)]
        with ExitStack() as stack:
            for _ in range(64):
                client = stack.enter_context(socket.socket())
                client.connect(listener.getsockname())
            num_turns = 0
            while len(made) < 64:
                num_turns += 1
                await asyncio.sleep(0)
        for server in servers:
            server.close()
        return num_turns

    with bind("127.0.0.1", 0) as listener:
        assert uvloop.run(count_turns(listener)) <= 12


def test_a_port_on_which_another_program_listens() -> None:
    with bind("127.0.0.1", 0) as other, pytest.raises(StartError, match="already in use; choose"):
        bind("127.0.0.1", other.getsockname()[1])


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
