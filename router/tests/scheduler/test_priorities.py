"""X-Priority, `service_tier` and vLLM's `priority`: the order of admission and preemption."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.entry import EntryState

from router.tests.chats import TEMPLATE
from router.tests.planning import Desk
from router.tests.serving import Server, serve
from router.tests.waiting import until

Json = dict[str, Any]

_REQUEST = st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from([0, 0, -4, 3]))


@given(
    st.lists(st.one_of(_REQUEST, st.none()), min_size=2, max_size=25),
    st.integers(6, 9),
    st.sampled_from([3, 4, 16]),
    st.booleans(),
)
def test_the_first_gets_on_and_the_last_make_room(
    events: list[tuple[int, int, int] | None], num_blocks: int, budget: int, chunks: bool
) -> None:
    """None is a step. All requests end, in no more steps than one after the other would need."""
    desk = Desk(
        **{"num_blocks": num_blocks, "max_batch_total_tokens": 4 * num_blocks},
        **{"max_batch_size": 4, "max_batch_prefill_tokens": budget, "chunks_prompts": chunks},
    )
    most_steps = 0
    for event in events:
        if event is None:
            _step(desk)
            continue
        length, num, priority = event
        desk.submit([desk.num, *range(1, length)], num, priority=priority)
        most_steps += length + 2 * num
    planner = desk.planner
    for _ in range(most_steps):
        if not (planner.running or planner.queue):
            break
        _step(desk)
    assert not planner.running and not planner.queue, "an entry does not end"
    assert planner.blocks.allocator.num_used == 0


def _step(desk: Desk) -> None:
    planner = desk.planner
    before = sorted(planner.running.values(), key=lambda entry: entry.rank)
    written = {entry.id: entry.num_computed for entry in before}
    plan = desk.plan()
    if plan is None:
        return
    preempted = [entry for entry in before if entry.state is EntryState.QUEUED]
    kept = [entry for entry in before if entry.id in plan.entries and entry not in plan.admitted]
    # The same plan can admit a preempted entry again.
    assert all(entry.rank < other.rank for entry in kept for other in preempted)
    assert not before or before[0] in kept, "the first has made room"
    waiting = [entry.rank for entry in planner.queue]
    assert all(entry.rank < rank for entry in plan.admitted for rank in waiting)
    ends = [i for i in plan.asked if plan.entries[i].num_tokens + 1 == plan.entries[i].max_context]
    desk.settle(plan, ending=ends)
    first = min(plan.entries.values(), key=lambda entry: entry.rank)
    start = written.get(first.id, first.num_cached_tokens)
    assert first.id in ends or first.num_computed > start, "the first stands still"


def test_the_lowest_priority_is_preempted_though_it_is_older() -> None:
    desk = Desk(num_blocks=6, max_batch_total_tokens=24)
    low = desk.submit(range(7), 17, priority=-1)
    desk.step()
    high = desk.submit(range(20, 27), 17)
    while desk.planner.num_preempted == 0:
        plan = desk.step()
    assert low.state is EntryState.QUEUED and plan.asked == {high.id}
    assert desk.planner.queue[0] is low


def test_a_prompt_of_higher_priority_is_computed_first() -> None:
    desk = Desk(max_batch_prefill_tokens=12)
    desk.submit(range(30), priority=-1)
    assert desk.step().chunks == {0: 12}
    desk.submit(range(100, 114), priority=1)
    desk.submit(range(200, 210), priority=-1)
    steps = [desk.step().chunks for _ in range(5)]
    assert steps == [{1: 12}, {1: 2, 0: 8}, {0: 10}, {2: 10}, {}]


def test_a_prompt_goes_on_where_a_higher_priority_has_no_room() -> None:
    for limits in ({"max_batch_size": 1}, {"num_blocks": 9}):
        desk = Desk(max_batch_prefill_tokens=12, **limits)
        desk.submit(range(30), 2, priority=-1)
        desk.step()
        desk.submit(range(100, 114), priority=1)
        assert desk.step().chunks == {0: 12}


# ---- Over HTTP ----

MESSAGES: Json = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with serve(tmp_path, "hello ", max_batch_size=1) as server:
        yield server


def _is_queued(server: Server, num: int) -> bool:
    return bool(server.services.metrics.queue_size.value >= num)


async def order_of(server: Server, asked: list[tuple[str, Json, dict[str, str]]]) -> list[int]:
    """The places of the requests in the order in which they end, when all come while one runs."""
    await server.client.post(CHAT, json=MESSAGES)  # starts the process for templates
    server.shards.delay_s = 0.02
    ended: list[int] = []

    async def ask(place: int) -> None:
        path, body, headers = asked[place]
        response = await server.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        ended.append(place)

    body = {"inputs": "n", "parameters": {"max_new_tokens": 40}}
    first = asyncio.create_task(server.client.post("/generate", json=body))
    await until(lambda: server.services.metrics.batch_current_size.value > 0)
    tasks = []
    for place in range(len(asked)):
        tasks.append(asyncio.create_task(ask(place)))
        await until(partial(_is_queued, server, place + 1))
    await asyncio.gather(first, *tasks)
    return ended


async def test_headers_order_requests_of_all_routes(server: Server) -> None:
    short: Json = {"inputs": "n", "parameters": {"max_new_tokens": 3}}
    asked = [
        ("/generate", short, {}),
        ("/generate_stream", short, {"x-priority": "-100"}),
        ("/v1/messages", {"model": "m", **MESSAGES}, {"x-priority": "1"}),
        ("/v1/embeddings", {"input": "a"}, {"x-priority": "100"}),
        (CHAT, MESSAGES, {"x-priority": "+1"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 20}, {"x-priority": "0"}),
    ]
    assert await order_of(server, asked) == [3, 2, 4, 0, 5, 1]


async def test_bodies_order_requests_and_the_header_goes_before_them(server: Server) -> None:
    asked: list[tuple[str, Json, dict[str, str]]] = [
        (CHAT, MESSAGES | {"service_tier": "flex"}, {}),
        (CHAT, MESSAGES | {"service_tier": "auto"}, {}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9, "service_tier": "priority"}, {}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "priority": -60}, {}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "priority": 60}, {}),
        (CHAT, MESSAGES | {"service_tier": "flex"}, {"x-priority": "70"}),
    ]
    assert await order_of(server, asked) == [5, 3, 2, 1, 0, 4]


@pytest.mark.parametrize(
    ("asked", "told", "warns"),
    [
        ("auto", "default", False),
        ("default", "default", False),
        ("priority", "priority", False),
        ("flex", "flex", False),
        ("scale", "default", True),
        (["flex"], "default", True),
    ],
)
async def test_the_answer_tells_its_tier(
    server: Server, asked: Any, told: str, warns: bool
) -> None:
    def check(response: httpx.Response) -> None:
        named = response.headers.get("warning", "")
        assert named == ('299 - "changes nothing here: service_tier"' if warns else "")

    response = await server.client.post(CHAT, json=MESSAGES | {"service_tier": asked})
    assert response.json()["service_tier"] == told
    check(response)
    body = MESSAGES | {"service_tier": asked, "stream": True}
    response = await server.client.post(CHAT, json=body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-2]]
    assert {json.loads(event)["service_tier"] for event in events} == {told}
    check(response)
    body = {"input": "a", "max_output_tokens": 3, "service_tier": asked}
    response = await server.client.post("/v1/responses", json=body)
    assert response.json()["service_tier"] == told
    check(response)


async def test_no_tier_is_told_that_was_not_asked_for(server: Server) -> None:
    response = await server.client.post(CHAT, json=MESSAGES)
    assert "service_tier" not in response.json()


@pytest.mark.parametrize("given", ["101", "-101", "1.5", "high", "", "1, 2", "9" * 5000])
async def test_a_header_that_is_no_priority(server: Server, given: str) -> None:
    headers = {"x-priority": given}
    response = await server.client.post("/generate", json={"inputs": "n"}, headers=headers)
    assert response.status_code == 422
    assert "the header X-Priority must be one whole number from -100 to 100" in response.text
    response = await server.client.post(CHAT, json=MESSAGES, headers=headers)
    assert response.status_code == 400 and len(response.text) < 300
