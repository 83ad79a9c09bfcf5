"""Requests that run at the same time, with different starts and ends."""

import asyncio
from typing import Any

import httpx

from integration_tests.server import LauncherHandle, stream_events

Streams = dict[int, list[dict[str, Any]]]


def new_tokens_of(index: int) -> int:
    """4 to 24, so that requests end at different times."""
    return 4 + index * 5 % 21


async def serve_together(server: LauncherHandle, prompts: list[str]) -> Streams:
    """All prompts, four at first; each later one joins when an earlier one has two tokens."""
    streams: Streams = {index: [] for index in range(len(prompts))}
    under_way = [asyncio.Event() for _ in prompts]

    async def one(client: httpx.AsyncClient, index: int) -> None:
        if index >= 4:
            await under_way[index - 4].wait()
        try:
            async for event in stream_events(
                client, prompts[index], max_new_tokens=new_tokens_of(index)
            ):
                streams[index].append(event)
                if len(streams[index]) == 2:
                    under_way[index].set()
        finally:
            under_way[index].set()

    async with server.async_client() as client, asyncio.TaskGroup() as group:
        for index in range(len(prompts)):
            group.create_task(one(client, index))
    return streams
