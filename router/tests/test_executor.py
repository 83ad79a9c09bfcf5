"""Work in threads: its order, its end, and what is held meanwhile."""

import asyncio
import threading

import pytest
from text_generation_router.errors import OverloadedError
from text_generation_router.executor import Executor, MemoryBudget


async def test_order_and_results() -> None:
    executor, done = Executor("test", 1), []
    results = await asyncio.gather(
        *(executor.run(lambda i=i: done.append(i) or i) for i in range(9))
    )
    assert results == done == list(range(9))
    with pytest.raises(KeyError):
        await executor.run({}.__getitem__, "x")
    executor.close()


async def test_cancelled_work_is_left_out_unless_it_has_begun() -> None:
    executor, gate = Executor("test", 1, most_waiting=2), threading.Event()
    running = asyncio.create_task(executor.run(gate.wait))
    called: list[int] = []
    waiting = [asyncio.create_task(executor.run(called.append, i)) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await executor.run(called.append, 3)
    waiting[0].cancel()
    running.cancel()
    await asyncio.gather(running, waiting[0], return_exceptions=True)
    assert not waiting[1].done(), "the thread is busy"
    gate.set()
    await waiting[1]
    await executor.run(called.append, 4)
    assert called == [1, 4]
    executor.close()


def test_memory_budget() -> None:
    memory_budget = MemoryBudget(10)
    with memory_budget.taken(100):
        with pytest.raises(OverloadedError), memory_budget.taken(1):
            pass
        assert memory_budget.num_taken == 100
    with (
        memory_budget.taken(6),
        memory_budget.taken(4),
        pytest.raises(OverloadedError),
        memory_budget.taken(1),
    ):
        pass
    assert memory_budget.num_taken == 0
