"""How the server is, and what follows what."""

import pytest
from text_generation_router.state import ServerState, State


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_start_in_phases() -> None:
    state = ServerState(Clock())
    assert state.as_json() == {
        "state": "starting",
        "phase": "starting",
        "since": "1970-01-01T00:00:01.000Z",
    }
    state.starting("warming up")
    state.starting("warming up")
    assert state.as_json()["phase"] == "warming up"
    assert state.as_json()["since"] == "1970-01-01T00:00:02.000Z"
    assert not state.has_started
    state.ready()
    assert state.has_started and state.state is State.READY
    assert state.age_s < 5


def test_shards_come_and_go() -> None:
    state = ServerState()
    state.restarting()
    assert state.state is State.STARTING, "nothing is restarted before it has started"
    state.ready()
    state.restarting("loading the model")
    assert (state.state, state.phase) == (State.DEGRADED, "loading the model")
    assert state.has_started
    state.ready()
    assert (state.state, state.phase) == (State.READY, "serving")
    state.starting("again")
    assert state.state is State.READY


@pytest.mark.parametrize("change", ["ready", "restarting", "draining"])
def test_there_is_no_way_back(change: str) -> None:
    state = ServerState()
    state.ready()
    state.draining()
    getattr(state, change)()
    assert state.state is State.DRAINING
    state.failed("The shards are gone")
    getattr(state, change)()
    assert (state.state, state.phase) == (State.FAILED, "The shards are gone")
