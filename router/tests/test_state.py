"""The states of the server, and the transitions between them."""

import pytest
from text_generation_router.state import ServerState, State


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
