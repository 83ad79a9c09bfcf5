"""The states of the server, the transitions between them, and the socket to the launcher."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from text_generation_router.state import PERIOD_S, LauncherLink, ServerState, State


def test_the_time_is_that_of_the_last_change() -> None:
    times = iter(range(1, 9))
    state = ServerState(lambda: next(times))
    assert state.as_json() == {
        "state": "starting",
        "phase": "starting",
        "since": "1970-01-01T00:00:01.000Z",
    }
    for _ in range(2):
        state.go(State.STARTING, "warming up")
        assert state.as_json()["phase"] == "warming up"
        assert state.as_json()["since"] == "1970-01-01T00:00:02.000Z"
    assert not state.has_started
    state.go(State.READY)
    assert state.has_started and state.age_s < 5


def test_shards_are_replaced_after_the_start_only() -> None:
    state = ServerState()
    for expected in (State.STARTING, State.DEGRADED):
        state.go(State.DEGRADED)
        assert state.state is expected
        state.go(State.READY)
        assert (state.state, state.phase) == (State.READY, "serving")
    state.go(State.STARTING, "again")
    assert state.state is State.READY


@pytest.mark.parametrize("change", [State.READY, State.DEGRADED, State.DRAINING])
def test_there_is_no_way_back(change: State) -> None:
    state = ServerState()
    state.go(State.READY)
    state.go(State.DRAINING)
    state.go(change)
    assert state.state is State.DRAINING
    state.go(State.FAILED, "The shards are gone")
    state.go(change)
    assert (state.state, state.phase) == (State.FAILED, "The shards are gone")


ALIVE = {"event": "alive"}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, int]]:
    """The launcher's end, and the router's."""
    launcher, router = socket.socketpair(type=socket.SOCK_SEQPACKET)
    launcher.setblocking(False)
    yield launcher, router.detach()  # each test closes the router's
    launcher.close()


def loading() -> ServerState:
    state = ServerState()
    state.go(State.STARTING, "loading the model")
    return state


def heard(launcher: socket.socket) -> list[dict[str, str]]:
    found = []
    with suppress(BlockingIOError):
        while data := launcher.recv(65536):
            found.append(json.loads(data))
    return found


@pytest.mark.usefixtures("clock")
async def test_it_beats_until_it_is_closed(ends: tuple[socket.socket, int]) -> None:
    launcher, router = ends
    link = LauncherLink(router, loading())
    assert not os.get_inheritable(router)
    link.begin()
    assert heard(launcher) == [ALIVE]
    await asyncio.sleep(10.5 * PERIOD_S)
    assert heard(launcher) == [ALIVE] * 10
    link.close()
    link.close()
    assert launcher.recv(1) == b"", "the launcher sees the end"


async def test_each_loss_is_one_message(ends: tuple[socket.socket, int]) -> None:
    launcher, router = ends
    link = LauncherLink(router, loading())
    for why in ('Shard 1 is "silent"\nand more', "another reason"):
        link.lost(why)
        assert heard(launcher) == [{"event": "lost", "why": why}]
    link.lost("\0é" * 10_000)
    [message] = heard(launcher)
    assert set(message["why"]) == {"\0", "é"} and 100 < len(message["why"]) < 4096
    link.close()
    link.lost("too late")


@pytest.mark.usefixtures("clock")
async def test_a_full_socket_loses_beats_but_not_the_loss(ends: tuple[socket.socket, int]) -> None:
    launcher, router = ends
    link = LauncherLink(router, loading())
    with suppress(BlockingIOError):
        while True:
            os.write(router, b"{}")
    link.begin()
    link.lost("gone")
    await asyncio.sleep(2.5 * PERIOD_S)
    assert all(message == {} for message in heard(launcher))
    await asyncio.sleep(5 * PERIOD_S)
    assert heard(launcher) == [{"event": "lost", "why": "gone"}] + [ALIVE] * 5
    link.close()


@pytest.mark.usefixtures("clock")
async def test_the_launchers_end_closes_the_socket(
    ends: tuple[socket.socket, int], caplog: pytest.LogCaptureFixture
) -> None:
    launcher, router = ends
    link = LauncherLink(router, loading())
    link.begin()
    launcher.close()
    await asyncio.sleep(5 * PERIOD_S)
    link.lost("gone")
    assert [record.getMessage() for record in caplog.records] == [
        "The launcher has closed its end of --launcher-fd"
    ]
    with pytest.raises(OSError):
        os.fstat(router)


def test_a_descriptor_that_is_not_open() -> None:
    with pytest.raises(ValueError, match=r"`--launcher-fd` must .*: 12345 is not \(Bad file"):
        LauncherLink(12345, loading())


async def test_the_last_message_is_shown(ends: tuple[socket.socket, int]) -> None:
    launcher, router = ends
    state = loading()
    link = LauncherLink(router, state)
    link.begin()

    async def shown(data: bytes) -> str | None:
        launcher.send(data)
        for _ in range(3):
            await asyncio.sleep(0)  # the loop looks at the socket
        return state.as_json().get("progress")

    assert await shown(b"shard 0: one\n") == "shard 0: one"
    assert await shown(b"shard 0: two\n") == "shard 0: two"
    assert await shown(b"\n") is None
    assert await shown(b"shard 0: three\n") == "shard 0: three"
    state.go(State.STARTING, "warming up")
    assert "progress" not in state.as_json()
    assert await shown(b"shard 0: four\n") is None, "it is late"
    state.go(State.READY)
    state.go(State.DEGRADED)
    assert await shown(b"shard 1: \xff\n") == "shard 1: \ufffd"
    link.close()
