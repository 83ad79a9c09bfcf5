"""Merging streams: nothing waits, nothing is lost, nothing goes on behind a failure."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from text_generation_router.api.openai.answers import merged


async def numbers(*pauses: float, failure: Exception | None = None) -> AsyncIterator[int]:
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield number
    if failure is not None:
        raise failure


@pytest.mark.usefixtures("clock")
async def test_none_waits_for_another() -> None:
    streams = [numbers(0.2, 0.0), numbers(0.0, 0.0, 0.0)]
    items = [item async for item in merged(streams)]
    assert items == [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]


async def test_one_stream_is_itself() -> None:
    assert [item async for item in merged([numbers(0, 0)])] == [(0, 0), (0, 1)]
    assert [item async for item in merged([])] == []


async def test_first_failure_is_raised_and_ends_the_others() -> None:
    streams = [numbers(0, failure=ValueError("a")), numbers(0, failure=ValueError("b")), forever()]
    with pytest.raises(ValueError, match="a"):
        async for _ in merged(streams):
            pass
    assert all_tasks() == set()


async def test_leaving_early_ends_all() -> None:
    async with aclosing(merged([numbers(0, 0), forever()])) as items:
        assert await anext(items) == (0, 0)
    assert all_tasks() == set()


async def forever() -> AsyncIterator[int]:
    await asyncio.Event().wait()
    yield 0


def all_tasks() -> set["asyncio.Task[object]"]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
