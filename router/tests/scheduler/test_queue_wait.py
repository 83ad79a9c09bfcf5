"""--max-queue-wait: a request that waits too long is refused, with a `retry-after`."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.tests.chats import TEMPLATE
from router.tests.scheduling import FakeShards, collect, running
from router.tests.serving import Server, serve
from router.tests.waiting import until

Json = dict[str, Any]

WAIT_S, STEP_S = 0.2, 0.02
MESSAGES: Json = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
SHORT: Json = {"inputs": "n", "parameters": {"max_new_tokens": 5}}


@asynccontextmanager
async def busy(directory: Path, seconds: float = 30, **options: Any) -> AsyncIterator[Server]:
    """A server with one row; a request runs for `seconds`, or until the end of the block."""
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with serve(directory, max_batch_size=1, **options) as server:
        server.shards.delay_s = STEP_S
        body = {"inputs": "n", "parameters": {"max_new_tokens": int(seconds / STEP_S)}}
        first = asyncio.create_task(server.client.post("/generate", json=body))
        await until(lambda: server.services.metrics.batch_current_size.value > 0)
        yield server
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: server.services.metrics.kv_blocks_used.value == 0)


async def test_a_started_request_is_not_refused_for_its_wait(tmp_path: Path) -> None:
    """The second of two sequences waits for the first, longer than any request may."""
    async with busy(tmp_path, 0.1, max_queue_wait=WAIT_S) as server:
        body = MESSAGES | {"n": 2, "max_tokens": 20}
        response = await server.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 2


async def test_a_deadline_that_is_shorter_counts(tmp_path: Path) -> None:
    async with busy(tmp_path, 0.5, max_queue_wait=WAIT_S) as server:
        headers = {"x-request-timeout": "0.1"}
        response = await server.client.post("/generate", json=SHORT, headers=headers)
        assert response.status_code == 504


async def test_without_the_flag_requests_wait_without_limit(tmp_path: Path) -> None:
    async with busy(tmp_path, 0.5) as server:
        response: httpx.Response = await server.client.post("/generate", json=SHORT)
        assert response.status_code == 200


async def test_the_pace_is_that_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waiting request is admitted when the one before has ended; refusals do not count."""
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    async with running(FakeShards(), max_batch_size=1) as rig:
        entries = [rig.submit((n,), 3) for n in range(10)]
        for entry in entries[:4]:
            now += 2
            await collect(entry)
        now += 2
        await until(lambda: entries[4].started is not None)
        # Five turns in ten seconds, and five wait.
        waiting = [entry for entry in entries[5:] if entry.started is None]
        assert rig.batcher.queue_retry_s() == pytest.approx(2 * len(waiting), abs=2)
        for entry in entries[7:]:
            rig.batcher.cancel(entry)
        assert rig.batcher.queue_retry_s() == pytest.approx(2 * (len(waiting) - 3), abs=2)
        for entry in entries[4:7]:
            await collect(entry)
