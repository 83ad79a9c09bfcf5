"""What an orchestrator is told, at every stage of a server's life."""

import asyncio
from pathlib import Path

import httpx
from text_generation_router.state import State

from router.tests.scheduling import Gate
from router.tests.serving import serve
from router.tests.waiting import until

PROBES = ("/livez", "/readyz", "/startupz")


async def codes(client: httpx.AsyncClient) -> tuple[int, ...]:
    """Of the three, in their order."""
    answers = [await client.get(path) for path in PROBES]
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert set(answer.json()) == {"state", "phase", "since"}
    return tuple(answer.status_code for answer in answers)


async def state_of(client: httpx.AsyncClient) -> str:
    """As all three tell it."""
    told = {(await client.get(path)).json()["state"] for path in PROBES}
    assert len(told) == 1
    return str(told.pop())


async def test_each_state(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        state, client = server.services.state, server.client
        assert (await codes(client), await state_of(client)) == ((200, 200, 200), "ready")
        state.go(State.DEGRADED)
        assert (await codes(client), await state_of(client)) == ((200, 503, 200), "degraded")
        state.go(State.READY)
        assert await codes(client) == (200, 200, 200)
        assert (await client.head("/readyz")).status_code == 200
        state.go(State.DRAINING)
        assert (await codes(client), await state_of(client)) == ((200, 503, 200), "draining")
        state.go(State.FAILED, "The scheduler has failed: KeyError: 5")
        assert await codes(client) == (503, 503, 200)
        told = (await client.get("/livez")).json()
        assert told["phase"] == "The scheduler has failed: KeyError: 5"


async def test_work_that_waits_in_vain(tmp_path: Path) -> None:
    """Not live within the deadline; live again as soon as a step has ended."""
    async with serve(tmp_path) as server:
        batcher = server.services.batcher
        object.__setattr__(server.services, "stall_s", 1.0)
        assert batcher.stalled_s == 0.0
        assert (await server.client.get("/livez")).status_code == 200, "no request waits"
        server.shards.hook = gate = Gate("prefill")
        body = {"inputs": "n", "parameters": {"max_new_tokens": 2}}
        asked = asyncio.create_task(server.client.post("/generate", json=body))
        await until(lambda: batcher.stalled_s > 0.0)
        assert (await server.client.get("/livez")).status_code == 200, "it waits for a moment"
        await until(lambda: batcher.stalled_s > 1.0)
        assert (await server.client.get("/livez")).status_code == 503
        assert (await server.client.get("/readyz")).status_code == 200
        # Work that waits while the shards are replaced waits for them.
        server.services.state.go(State.DEGRADED)
        assert (await server.client.get("/livez")).status_code == 200
        server.services.state.go(State.READY)
        assert (await server.client.get("/livez")).status_code == 200
        gate.open()
        assert (await asked).status_code == 200
        assert (await server.client.get("/livez")).status_code == 200
