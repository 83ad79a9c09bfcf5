"""Several ranks of one model, in real gRPC servers: numbers, agreement, ranks that die."""

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from text_generation_proto import pb
from text_generation_router.client import recovery
from text_generation_router.client import shards as client_shards
from text_generation_router.client.recovery import WatchedShards
from text_generation_router.client.shards import ShardedClient
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.step import GoneShardError, LostStepError

from router.tests.client.test_shards import CALLS, Rank, make_prefill, serving
from router.tests.scheduling import make_decode
from router.tests.waiting import until


def numbers(rank: Any) -> list[int]:
    """Of the messages it was sent, as they came."""
    return [request.number for request in rank.asked if hasattr(request, "number")]


async def test_all_ranks_get_the_same_numbers_one_more_each_time(tmp_path: Path) -> None:
    async with serving(tmp_path, 3) as (client, ranks):
        for call in [*CALLS, *CALLS]:
            await call(client)
        # Of the eight, Health, Info and CompileGrammar have none.
        assert [numbers(rank) for rank in ranks] == [list(range(1, 11))] * 3


async def test_numbers_go_on_behind_the_largest_of_all_ranks(tmp_path: Path) -> None:
    async with serving(tmp_path, 2) as (_, ranks):
        ranks[0].info.last_number, ranks[1].info.last_number = 6, 2**40
        client = await ShardedClient.connect(f"{tmp_path}/shard-0", timeout_s=10)
        assert (await client.info()).last_number == 2**40
        await client.clear_cache(None)
        await client.close()
        assert numbers(ranks[0]) == numbers(ranks[1]) == [2**40 + 1]


async def test_steps_ahead_are_numbered_as_they_are_sent(tmp_path: Path) -> None:
    async with serving(tmp_path, 2) as (client, ranks):
        await client.step(make_decode(), 0)
        ranks[1].delay_s = 0.002
        calls = [client.step(make_decode(is_ahead=True), n) for n in range(1, 20)]
        await asyncio.gather(*(asyncio.create_task(call) for call in calls))
        for rank in ranks:
            assert [(request.batch_ids[0], request.number) for request in rank.asked] == [
                (n, n + 1) for n in range(20)
            ]


async def test_a_rank_whose_socket_is_missing_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, 1) as (_, [rank]):
        rank._urls.append(f"unix://{tmp_path}/shard-1")
        sentence = f"no answer from the shard at {tmp_path}/shard-1 within 0.1 s, though the one at"
        with pytest.raises(GenerationError, match=sentence):
            await ShardedClient.connect(f"{tmp_path}/shard-0", timeout_s=0.1)


class Hanging(Rank):
    """Records which of its calls were cancelled."""

    num_cancelled = 0

    async def _answer(self, request: Any, context: Any, response: Any) -> Any:
        try:
            return await super()._answer(request, context, response)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.step(make_prefill(), 3),
        lambda client: client.step(make_decode(), 3),
        lambda client: client.clear_cache(3),
        lambda client: client.warmup(max_prefill_tokens=100, max_batch_size=8),
    ],
)
async def test_a_rank_that_dies_while_another_hangs(
    tmp_path: Path, call: Callable[[ShardedClient], Any], dead: int
) -> None:
    async with serving(tmp_path, 2, Hanging) as (client, ranks):
        for rank in ranks:
            rank.delay_s = 3600
        task = asyncio.create_task(call(client))
        await until(lambda: all(rank.asked for rank in ranks))
        await ranks[dead].stop(None)
        started = time.perf_counter()
        with pytest.raises(LostStepError, match=f"generation server: shard {dead}: |shard {dead}"):
            await task
        assert time.perf_counter() - started < 1
        await until(lambda: ranks[1 - dead].num_cancelled == 1)
        # Later requests fail at once.
        with pytest.raises(LostStepError, match="Could not connect"):
            await asyncio.wait_for(call(client), 2)


async def test_a_rank_that_hangs_when_another_has_failed(tmp_path: Path) -> None:
    """As one that was stopped: the other has given it up, and is about to end."""
    async with serving(tmp_path, 2) as (client, ranks):
        ranks[0].failure = (grpc.StatusCode.INTERNAL, "shard 1 did not come within 20 s")
        ranks[1].delay_s = 3600
        started = time.perf_counter()
        with pytest.raises(LostStepError, match="Server error: shard 0: shard 1 did not come"):
            await asyncio.wait_for(client.step(make_decode(), 3), 10)
        assert time.perf_counter() - started < 2 * client_shards.OTHERS_S + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.step(make_decode(), 3),
        lambda client: client.clear_cache(None),
        lambda client: client.info(),
        lambda client: client.warmup(max_prefill_tokens=100, max_batch_size=8),
    ],
)
async def test_a_rank_that_is_silent_when_another_has_answered(
    tmp_path: Path, call: Callable[[ShardedClient], Any]
) -> None:
    """It was stopped when it had computed its part: no other rank waits for it."""
    async with serving(tmp_path, 2) as (client, ranks):
        client.answer_s, ranks[1].delay_s = 0.05, 3600
        with pytest.raises(LostStepError, match="Server error: shard 1 did not answer, though"):
            await asyncio.wait_for(call(client), 5)


async def test_a_silent_rank_ends_all_that_is_under_way(tmp_path: Path) -> None:
    """Also a step that was launched after the lost one."""
    async with serving(tmp_path, 2) as (client, ranks):
        client.answer_s, ranks[1].delay_s = 0.05, 3600
        watched = WatchedShards(client)
        steps = [watched.step(make_decode(is_ahead=ahead), 3) for ahead in (False, True)]
        outcomes = await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), 5)
        sentence = "Server error: shard 1 did not answer, though others have: stopped, or hung"
        assert str(watched.verdict) == sentence
        for outcome in outcomes:
            assert isinstance(outcome, LostStepError) and str(outcome) == sentence
        with pytest.raises(LostStepError, match="shard 1 did not answer"):
            await watched.clear_cache(None)


async def test_a_rank_that_listens_and_does_not_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, 1):
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(f"{tmp_path}/deaf")
            deaf.listen()
            with pytest.raises(GenerationError, match="deaf listens and has not answered for"):
                await ShardedClient.connect(f"{tmp_path}/deaf", answer_s=0.1)


async def test_a_rank_that_stops_before_it_has_said_where_the_others_are(tmp_path: Path) -> None:
    class Stops(Rank):
        is_stopped = False

        async def ServiceDiscovery(self, request: Any, context: Any) -> Any:
            await asyncio.sleep(3600 * self.is_stopped)
            return await super().ServiceDiscovery(request, context)

    async with serving(tmp_path, 1, Stops) as (_, [rank]):
        rank.is_stopped = True
        with pytest.raises(GenerationError, match="shard-0 listens and has not answered for"):
            await ShardedClient.connect(f"{tmp_path}/shard-0", answer_s=0.2)


async def test_a_step_behind_one_that_failed(tmp_path: Path) -> None:
    """Both fail, neither waits for ever, and the message that clears goes to all ranks."""
    async with serving(tmp_path, 2) as (client, ranks):
        await client.step(make_decode(), 3)
        for rank in ranks:
            rank.delay_s, rank.failure = 0.01, (grpc.StatusCode.INTERNAL, "out of luck")
        steps = [client.step(make_decode(is_ahead=True), 3) for _ in range(2)]
        outcomes = await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), 5)
        assert {str(outcome) for outcome in outcomes} == {"Server error: shard 0: out of luck"}
        for rank in ranks:
            rank.failure = None
        await client.clear_cache(3)
        assert [numbers(rank)[-1] for rank in ranks] == [4, 4]


async def test_the_silent_rank_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.05)
    monkeypatch.setattr(recovery, "LOOK_S", 0.01)
    monkeypatch.setattr(client_shards, "_HEALTH_TIMEOUT_S", 0.05)
    async with serving(tmp_path, 2) as (client, ranks):
        ranks[1].delay_s = 3600
        watched = WatchedShards(client)
        with pytest.raises(LostStepError) as caught:
            await asyncio.wait_for(watched.step(make_decode(), 3), 5)
        assert watched.verdict is not None
        why, detail = watched.verdict.args
        assert why.startswith("The shards have not answered for")
        assert detail == "Server error: shard 1: Deadline Exceeded"
        assert "shard 1" not in caught.value.message and "shard 1" in str(caught.value)
        assert sum(isinstance(request, pb.HealthRequest) for request in ranks[1].asked) == 4


async def test_an_end_is_noticed_without_a_call(tmp_path: Path) -> None:
    async with serving(tmp_path, 2) as (client, ranks):
        await client.health()
        assert not client.may_be_gone
        await ranks[1].stop(None)
        await until(lambda: client.may_be_gone)
        with pytest.raises(GoneShardError):
            await client.health()


@pytest.mark.slow
async def test_a_channel_that_was_not_used_is_connected_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = ("grpc.client_idle_timeout_ms", 1000)
    monkeypatch.setattr(client_shards, "_CHANNEL_OPTIONS", [*client_shards._CHANNEL_OPTIONS, idle])
    async with serving(tmp_path, 2) as (client, _):
        await client.health()
        await until(lambda: client.may_be_gone)
        await client.health()
        assert not client.may_be_gone
