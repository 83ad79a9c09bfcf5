"""The client against real gRPC servers on unix sockets, one per rank."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from text_generation_proto import pb, pb_grpc
from text_generation_router.client.recovery import WatchedShards
from text_generation_router.client.shards import ShardedClient
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.step import CachedBatch, GrammarResult, LostStepError, Plan

from router.tests.client.test_messages_of_steps import make_entry
from router.tests.scheduling import make_decode
from router.tests.waiting import until


def make_prefill() -> Plan:
    """The plan of a Prefill of one new row."""
    return Plan([make_entry()], {}, {}, frozenset())


class Rank(pb_grpc.TextGenerationServiceServicer):
    """Answers with its rank, remembers what it was asked, and fails on request."""

    def __init__(self, rank: int, urls: list[str]) -> None:
        self.info = pb.InfoResponse(rank=rank, world_size=len(urls))
        self._rank = rank
        self._urls = urls
        self.asked: list[Any] = []
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.delay_s = 0.0
        self.num_answered = 0
        self.num_decode_calls = 0
        self.stop: Callable[[None], Awaitable[None]]

    async def _answer(self, request: Any, context: Any, response: Any) -> Any:
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        self.num_answered += 1
        if self.failure is not None:
            await context.abort(*self.failure)
        return response

    async def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def Info(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context, self.info)

    async def Health(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context, pb.HealthResponse())

    async def Warmup(self, request: Any, context: Any) -> Any:
        rank = self._rank
        warmup = pb.WarmupResponse(
            num_blocks=9 - rank, kv_cache_bytes=10, decode_step_ns=rank, prefill_token_ns=rank
        )
        return await self._answer(request, context, warmup)

    async def Prefill(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context, self._step(request.batch.id, request.number))

    async def Decode(self, requests: Any, context: Any) -> Any:
        self.num_decode_calls += 1
        async for request in requests:
            step = self._step(request.batch_ids[0], request.number)
            yield await self._answer(request, context, step)

    async def FilterBatch(self, request: Any, context: Any) -> Any:
        batch = pb.CachedBatch(id=request.batch_id, request_ids=request.request_ids)
        return await self._answer(request, context, pb.FilterBatchResponse(batch=batch))

    async def CompileGrammar(self, request: Any, context: Any) -> Any:
        response = pb.CompileGrammarResponse(error=request.grammar, min_tokens=3)
        return await self._answer(request, context, response)

    async def ClearCache(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context, pb.ClearCacheResponse())

    def _step(self, batch_id: int, number: int) -> pb.StepResponse:
        """A single rank sends no digest; ranks other than 0 send only the digest and the times."""
        digest = number + 1000 if len(self._urls) > 1 else None
        if self._rank:
            return pb.StepResponse(digest=digest, forward_ns=self._rank, decode_ns=10)
        return pb.StepResponse(
            digest=digest,
            decode_ns=10,
            generations=pb.Generations(
                request_ids=[11], token_ids=[5], logprobs=[0.0], finish_reasons=[0]
            ),
            batch=pb.CachedBatch(id=batch_id, request_ids=[11]),
        )


@asynccontextmanager
async def serving(
    directory: Path, num: int, kind: type[Rank] = Rank
) -> AsyncIterator[tuple[ShardedClient, list[Any]]]:
    """A client and the ranks that it is connected to, of which it has asked nothing else yet."""
    urls = [f"unix://{directory}/shard-{rank}" for rank in range(num)]
    ranks = [kind(rank, urls) for rank in range(num)]
    servers = []
    for rank, url in zip(ranks, urls, strict=True):
        server = grpc.aio.server()
        pb_grpc.add_TextGenerationServiceServicer_to_server(rank, server)
        server.add_insecure_port(url)
        await server.start()
        rank.stop = server.stop
        servers.append(server)
    client = await ShardedClient.connect(f"{directory}/shard-0", timeout_s=10)
    for rank in ranks:
        rank.asked.clear()
        rank.num_answered = 0
    try:
        yield client, ranks
    finally:
        await client.close()
        for server in servers:
            await server.stop(None)


CALLS: list[Callable[[ShardedClient], Any]] = [
    lambda client: client.step(make_prefill(), 3),
    lambda client: client.step(make_decode(), 3),
    lambda client: client.filter_batch(3, [11]),
    lambda client: client.clear_cache(3),
    lambda client: client.health(),
    lambda client: client.info(),
    lambda client: client.warmup(max_prefill_tokens=100, max_batch_size=8),
    lambda client: client.compile_grammar("no start", 5.0),
]


async def test_every_call_goes_to_all_ranks_and_rank_0_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, 3) as (client, ranks):
        answers = [await call(client) for call in CALLS]
        assert all(len(rank.asked) == len(CALLS) for rank in ranks)
        assert ranks[0].asked == ranks[1].asked == ranks[2].asked
    prefill, decode, kept, _, _, info, warmup, compiled = answers
    assert prefill.token_ids == decode.token_ids == (5,) and info.rank == 0
    assert prefill.shard_ns == decode.shard_ns == [10, 11, 12]
    assert kept == CachedBatch(3, (11,))
    assert (warmup.num_blocks, warmup.kv_cache_bytes) == (7, 30)
    assert (warmup.decode_step_ns, warmup.prefill_token_ns) == (2, 2), "of the slowest"
    assert compiled == GrammarResult("no start", 3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("failing", [0, 1])
async def test_a_failure_of_any_rank_is_a_generation_error(
    tmp_path: Path, call: Callable[[ShardedClient], Any], failing: int
) -> None:
    async with serving(tmp_path, 2) as (client, ranks):
        ranks[failing].failure = (grpc.StatusCode.INTERNAL, "out of luck")
        ranks[1 - failing].delay_s = 0.02
        with pytest.raises(GenerationError) as error:
            await call(client)
        assert str(error.value) == f"Server error: shard {failing}: out of luck"
        # The call is over for every rank: none of them is still busy with it.
        assert ranks[1 - failing].num_answered == 1
        # One rank has done what the other has not.
        assert isinstance(error.value, LostStepError)


async def test_a_grammar_that_takes_too_long(tmp_path: Path) -> None:
    async with serving(tmp_path, 2) as (client, ranks):
        ranks[1].delay_s = 5
        with pytest.raises(TimeoutError):
            await client.compile_grammar("x", 0.05)
        ranks[1].delay_s = 0
        assert (await client.step(make_prefill(), 3)).token_ids == (5,)


async def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, 1) as (client, [rank]):
        rank.failure = (grpc.StatusCode.UNAVAILABLE, "going away")
        with pytest.raises(LostStepError) as error:
            await client.health()
        assert str(error.value) == "Could not connect to Text Generation server: going away"
        assert error.value.message == (
            "Request failed during generation: Could not connect to Text Generation server; the "
            "server's log says why"
        )
        await rank.stop(None)
        with pytest.raises(GenerationError, match="Could not connect to Text Generation server: "):
            await client.health()


@pytest.mark.parametrize("plan", [make_decode(), make_prefill()], ids=["decode", "prefill"])
@pytest.mark.parametrize("num", [1, 2])
async def test_a_call_in_flight_fails_when_the_client_closes(
    tmp_path: Path, num: int, plan: Plan
) -> None:
    async with serving(tmp_path, num) as (client, ranks):
        for rank in ranks:
            rank.delay_s = 5
        call = asyncio.create_task(client.step(plan, 3))
        await until(lambda: all(rank.asked for rank in ranks))
        await client.close()
        with pytest.raises(GenerationError, match="Could not connect"):
            await asyncio.wait_for(call, 1)


class Listener(pb_grpc.TextGenerationServiceServicer):
    """In a thread of its own: records each step, also while the client's event loop is busy."""

    def __init__(self, rank: int, urls: list[str]) -> None:
        self._info = pb.InfoResponse(rank=rank, world_size=len(urls))
        self._urls = urls
        self.asked = threading.Event()

    def Info(self, request: Any, context: Any) -> Any:
        return self._info

    def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    def Prefill(self, request: Any, context: Any) -> Any:
        self.asked.set()
        return pb.StepResponse(digest=1)

    def Decode(self, requests: Any, context: Any) -> Any:
        for _ in requests:
            self.asked.set()
            yield pb.StepResponse(digest=1)


@pytest.mark.parametrize("plan", [make_decode(), make_prefill()], ids=["decode", "prefill"])
@pytest.mark.parametrize("num", [1, 2])
async def test_a_step_is_sent_within_one_turn_of_the_event_loop(
    tmp_path: Path, num: int, plan: Plan
) -> None:
    """Otherwise the router's text work would delay the shards instead of overlapping with them."""
    urls = [f"unix://{tmp_path}/shard-{rank}" for rank in range(num)]
    shards = [Listener(rank, urls) for rank in range(num)]
    with ExitStack() as stack:
        for shard, url in zip(shards, urls, strict=True):
            server = grpc.server(stack.enter_context(ThreadPoolExecutor(2)))
            pb_grpc.add_TextGenerationServiceServicer_to_server(shard, server)
            server.add_insecure_port(url)
            server.start()
            stack.callback(lambda server=server: server.stop(None).wait())
        client = await ShardedClient.connect(f"{tmp_path}/shard-0", timeout_s=10)
        # The first step opens the call.
        await client.step(make_decode(), 3)
        for shard in shards:
            shard.asked.clear()
        call = WatchedShards(client).step(plan, 3)
        await asyncio.sleep(0)
        for shard in shards:
            assert shard.asked.wait(5), "the loop stands still, and the call is not there"
        await call
        await client.close()


async def test_steps_go_through_one_call_until_it_fails(tmp_path: Path) -> None:
    async with serving(tmp_path, 1) as (client, [rank]):
        for _ in range(2):
            rank.failure = None
            for _ in range(3):
                assert (await client.step(make_decode(), 3)).batch == CachedBatch(3, (11,))
            rank.failure = (grpc.StatusCode.INTERNAL, "out of luck")
            with pytest.raises(GenerationError, match="Server error: out of luck"):
                await client.step(make_decode(), 3)
        assert rank.num_decode_calls == 2


async def test_a_cancelled_step(tmp_path: Path) -> None:
    """Its answer must not be taken for that of the next."""
    async with serving(tmp_path, 1) as (client, [rank]):
        rank.delay_s = 0.05
        call = asyncio.create_task(client.step(make_decode(), 3))
        await until(lambda: bool(rank.asked))
        call.cancel()
        await asyncio.wait({call})
        assert (await client.step(make_decode(), 4)).batch == CachedBatch(4, (11,))


async def test_no_shard_listens(tmp_path: Path) -> None:
    with pytest.raises(
        GenerationError, match=r"no answer from the shards at .*/nobody within 0.1 s"
    ):
        await ShardedClient.connect(f"{tmp_path}/nobody", timeout_s=0.1)


async def test_steps_that_are_sent_before_the_last_is_answered(tmp_path: Path) -> None:
    """One call carries them all, and each gets its own answer, in any order of waiting."""
    async with serving(tmp_path, 2) as (client, ranks):
        await client.step(make_decode(), 3)
        for rank in ranks:
            rank.delay_s = 0.002
        for first in range(10, 60, 5):
            ids = range(first, first + 5)
            calls = [client.step(make_decode(is_ahead=True), batch_id) for batch_id in ids]
            results = await asyncio.gather(*calls)
            assert [result.batch for result in results] == [CachedBatch(i, (11,)) for i in ids]
        assert [rank.num_decode_calls for rank in ranks] == [1, 1]
