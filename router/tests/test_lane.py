"""Work in lanes: its order, its end, and what is held meanwhile."""

import asyncio
import threading

import pytest
from text_generation_router.errors import OverloadedError
from text_generation_router.lane import Lane, Room


async def test_order_and_results() -> None:
    lane, done = Lane("test", 1), []
    results = await asyncio.gather(*(lane.run(lambda i=i: done.append(i) or i) for i in range(9)))
    assert results == done == list(range(9))
    with pytest.raises(KeyError):
        await lane.run({}.__getitem__, "x")
    lane.close()


async def test_who_leaves_gives_the_place_back() -> None:
    lane, gate = Lane("test", 1, most_waiting=2), threading.Event()
    running = asyncio.create_task(lane.run(gate.wait))
    await asyncio.sleep(0)
    called: list[int] = []
    waiting = [asyncio.create_task(lane.run(called.append, i)) for i in range(2)]
    await asyncio.sleep(0)
    assert lane.num_waiting == 2
    with pytest.raises(OverloadedError):
        await lane.run(called.append, 3)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert lane.num_waiting == 1
    # A caller that leaves while the thread works does not free the thread for the next call.
    running.cancel()
    await asyncio.gather(running, waiting[0], return_exceptions=True)
    assert not waiting[1].done()
    gate.set()
    await waiting[1]
    assert called == [1]
    await lane.run(called.append, 4)
    assert called == [1, 4]
    lane.close()


def test_room() -> None:
    room = Room(10)
    with room.taken(100):
        with pytest.raises(OverloadedError), room.taken(1):
            pass
        assert room.num_taken == 100
    with room.taken(6), room.taken(4), pytest.raises(OverloadedError), room.taken(1):
        pass
    assert room.num_taken == 0
