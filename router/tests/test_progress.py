"""What the router reads of the shards while they load."""

import asyncio
import os

import pytest
from text_generation_router.progress import Progress
from text_generation_router.state import ServerState


def loading() -> ServerState:
    state = ServerState()
    state.starting("loading the model")
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
    state.starting("warming up")
    assert "progress" not in state.as_json()
    await written(writer, b"shard 0: four\n")
    assert "progress" not in state.as_json(), "it is late"
    state.ready()
    state.restarting()
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
    await asyncio.sleep(0.01)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    progress.close()


async def test_without_a_launcher_nothing_happens() -> None:
    progress = Progress(None, loading())
    progress.begin()
    progress.close()


def test_a_descriptor_that_can_not_be_read() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(ValueError, match=r"`--progress-fd` must .* is not \(Bad file"):
            Progress(writer, loading())
    finally:
        os.close(reader)
        os.close(writer)
