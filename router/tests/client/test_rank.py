"""Prompts go to a socket of our own user's, and to no other that takes its place."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from text_generation_router.client.ranks import path_of
from text_generation_router.client.shards import Rank, ShardedClient
from text_generation_router.errors import GenerationError

NOBODY = 65534


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def answers(shard: Rank, server: socket.socket) -> bool:
    """Whether a connection to the address reaches this server."""
    server.setblocking(False)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(shard.address)
        try:
            while True:  # the probe came first
                connection, _ = server.accept()
                with connection:
                    client.sendall(b"x")
                    connection.setblocking(False)
                    try:
                        if connection.recv(1) == b"x":
                            return True
                    except BlockingIOError:
                        continue
        except BlockingIOError:
            return False


async def test_an_address_leads_to_the_socket_that_was_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    with listening(path) as ours:
        shard = Rank(str(path))
        path.unlink()
        with listening(path) as other:
            assert answers(shard, ours)
            assert not answers(shard, other)
        await shard.close()


async def test_no_process_listens(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    with pytest.raises(FileNotFoundError):
        Rank(str(path))
    listening(path).close()
    with pytest.raises(ConnectionRefusedError):
        Rank(str(path))
    path.unlink()
    path.touch()
    with pytest.raises(GenerationError, match="is not a socket: give that of a shard"):
        Rank(str(path))


async def test_a_strangers_socket_is_refused(tmp_path: Path) -> None:
    """One that he has made, and one that he listens at though it looks like ours."""
    if os.geteuid() != 0:
        pytest.fail("this test plays another user of the machine: run it as root, as CI does")
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents[:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    path = tmp_path / "s-0"
    script = (
        f"import os, socket; os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        f"s.bind({str(path)!r}); s.listen(); print('up', flush=True); s.accept(); input()"
    )
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"up\n"
        sentence = f"{path} is a socket of user {NOBODY}, and this router runs as user 0: nothing"
        with pytest.raises(GenerationError, match=sentence):
            await ShardedClient.connect(str(path), timeout_s=5)
        os.chown(path, 0, 0)
        with pytest.raises(GenerationError, match=sentence):
            await ShardedClient.connect(str(path), timeout_s=5)
        stranger.kill()


def test_path_of() -> None:
    assert path_of("unix:///tmp/s-1") == path_of("unix:/tmp/s-1") == "/tmp/s-1"
    assert path_of("unix:s-1") == "s-1"
