"""The pipes between launcher and router: heartbeats, losses, and the progress of shards."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from text_generation_router.launcher_pipes import PERIOD_S, Heartbeat, Progress
from text_generation_router.state import ServerState, State

ALIVE = {"event": "alive"}


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer  # each test closes the writer
    os.close(reader)


def heard(reader: int) -> list[dict[str, str]]:
    data = b""
    with suppress(BlockingIOError):
        while part := os.read(reader, 65536):
            data += part
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.usefixtures("clock")
async def test_it_beats_until_it_is_closed(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    beat = Heartbeat(writer)
    assert not os.get_inheritable(writer)
    beat.begin()
    assert heard(reader) == [ALIVE]
    await asyncio.sleep(10.5 * PERIOD_S)
    assert heard(reader) == [ALIVE] * 10
    beat.close()
    beat.close()
    assert os.read(reader, 1) == b"", "the launcher sees the pipe's end"


def test_each_loss_is_one_line(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    beat = Heartbeat(writer)
    for why in ('Shard 1 is "silent"\nand more', "another reason"):
        beat.lost(why)
        assert heard(reader) == [{"event": "lost", "why": why}]
    beat.lost("\0é" * 10_000)
    [line] = heard(reader)
    assert set(line["why"]) == {"\0", "é"} and 100 < len(line["why"]) < 4096
    beat.close()
    beat.lost("too late")


@pytest.mark.usefixtures("clock")
async def test_a_full_pipe_loses_beats_but_not_the_loss(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    beat = Heartbeat(writer)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    beat.begin()
    beat.lost("gone")
    await asyncio.sleep(2.5 * PERIOD_S)
    with suppress(BlockingIOError):
        while True:
            assert set(os.read(reader, 65536)) == {ord("\n")}
    await asyncio.sleep(5 * PERIOD_S)
    assert heard(reader) == [{"event": "lost", "why": "gone"}] + [ALIVE] * 5
    beat.close()


@pytest.mark.usefixtures("clock")
async def test_without_a_reader(pipe: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = pipe
    beat = Heartbeat(writer)
    beat.begin()
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)
    await asyncio.sleep(5 * PERIOD_S)
    beat.lost("gone")
    assert [record.getMessage() for record in caplog.records] == [
        "The launcher has closed its end of --launcher-fd: Broken pipe"
    ]
    with pytest.raises(OSError):
        os.fstat(writer)


def test_a_descriptor_that_is_not_open() -> None:
    with pytest.raises(ValueError, match=r"`--launcher-fd` must .*: 12345 is not \(Bad file"):
        Heartbeat(12345)


def loading() -> ServerState:
    state = ServerState()
    state.go(State.STARTING, "loading the model")
    return state


async def written(writer: int, data: bytes) -> None:
    os.write(writer, data)
    for _ in range(3):
        await asyncio.sleep(0)  # the loop looks at the pipe


async def test_the_last_whole_line_is_shown() -> None:
    reader, writer = os.pipe()
    state = loading()
    progress = Progress(reader, state)
    assert not os.get_inheritable(reader)
    progress.begin()
    await written(writer, b"shard 0: one\nshard 0: two\nshard 0: th")
    assert state.as_json()["progress"] == "shard 0: two"
    await written(writer, b"ree\n")
    assert state.as_json()["progress"] == "shard 0: three"
    state.go(State.STARTING, "warming up")
    assert "progress" not in state.as_json()
    await written(writer, b"shard 0: four\n")
    assert "progress" not in state.as_json(), "it is late"
    state.go(State.READY)
    state.go(State.DEGRADED)
    await written(writer, b"shard 1: \xff\n")
    assert state.as_json()["progress"] == "shard 1: \ufffd"
    progress.close()
    progress.close()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x\n")
    os.close(writer)


async def test_the_launchers_end_closes_the_pipe() -> None:
    reader, writer = os.pipe()
    progress = Progress(reader, loading())
    progress.begin()
    os.close(writer)
    while progress._descriptor is not None:
        await asyncio.sleep(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    progress.close()
