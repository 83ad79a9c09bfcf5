"""Two shards' services take the same messages, as threads of one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from text_generation_process.flags import ShardConfig
from text_generation_proto import pb
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.planner import Costs
from text_generation_shard.engine.step import StepRunner
from text_generation_shard.errors import RankError
from text_generation_shard.models.registry import read_config
from text_generation_shard.parallel import World
from text_generation_shard.server import load_on
from text_generation_shard.service import ShardService

from shard.tests.driver import reference_device, step_of
from shard.tests.grammars.test_grammar import schema_text
from shard.tests.ranks import Board, ThreadCollectives

# How long a rank waits for another one, or for a message, in these tests.
DEADLINE_S = 1.0
# What repeats itself is drafted: one of few tokens each time, and a text of the same words.
FEW = {5: 60.0, 6: 60.0, 7: 60.0}
WORDS = schema_text({"type": "array", "items": {"const": "ab"}, "minItems": 5, "maxItems": 5})


class Shards:
    """Services of all ranks in one event loop, each with its device thread. Owns the numbers of
    messages and which blocks are free, as a router does."""

    def __init__(self, path: Path, size: int) -> None:
        self.board = Board(size, DEADLINE_S)
        self.final: list[RankError] = []
        self.number, self._num_blocks = 0, 0
        self.ranks = [self._service(path, rank, size) for rank in range(size)]

    def _service(self, path: Path, rank: int, size: int) -> ShardService:
        thread = ThreadPoolExecutor(1)
        world = World(rank, size, ThreadCollectives(self.board, rank)) if size > 1 else World()
        config = ShardConfig(path, rank=rank, world_size=size, step_deadline=DEADLINE_S)
        engine = load_on(reference_device(), config, read_config(config), world)
        return ShardService(engine, thread, config, self.final.append)

    def next(self) -> int:
        """The number of the next message."""
        self.number += 1
        return self.number

    async def all(self, name: str, request: Any) -> list[Any]:
        """Each rank's answer to a message, or its error."""
        calls = [getattr(rank, name)(request, None) for rank in self.ranks]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def warm_up(self, max_batch_size: int = 8) -> list[Any]:
        """Answers to the first message. Sets costs with which draft tokens pay almost always."""
        request = pb.WarmupRequest(
            max_prefill_tokens=64,
            max_batch_size=max_batch_size,
            max_total_tokens=96,
            number=self.next(),
        )
        answers = await self.all("Warmup", request)
        for rank in self.ranks:
            rank._engine._planner.costs = Costs(10**6, 10**6, 1, 0)
        return answers

    def prefill(
        self, requests: Sequence[pb.Request], joins: int | None = None, **advances: Any
    ) -> pb.PrefillRequest:
        """A message with new requests; `joins` advances the running batch."""
        batch, engine = pb.Batch(id=requests[0].id, requests=requests), self.ranks[0]._engine
        step, _ = step_of(engine, requests, runs_on=joins is not None, **advances)
        return pb.PrefillRequest(batch=batch, cached_batch_id=joins, step=step, number=self.next())

    def request(self, request_id: int, ids: Sequence[int], **options: Any) -> pb.Request:
        """With blocks for 96 tokens."""
        first = self._num_blocks
        self._num_blocks += 96 // self.ranks[0]._engine.block_size + 1
        stopping = pb.StoppingCriteriaParameters(
            max_new_tokens=options.pop("max_new_tokens", 20),
            ignore_eos_token=not options.get("grammar"),
        )
        chooser = pb.NextTokenChooserParameters(
            temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, seed=request_id
        )
        chooser.do_sample = options.pop("do_sample", False)
        bias = options.pop("bias", {})
        chooser.logit_bias_ids[:], chooser.logit_bias_values[:] = bias.keys(), bias.values()
        return pb.Request(
            id=request_id,
            input_ids=list(ids),
            num_prompt_tokens=len(ids),
            block_table=range(first, self._num_blocks),
            stopping_parameters=stopping,
            parameters=chooser,
            **options,
        )

    def decode(self, batch_id: int, **advance: Any) -> pb.DecodeRequest:
        """A message that advances a batch."""
        step, _ = step_of(self.ranks[0]._engine, **advance)
        return pb.DecodeRequest(batch_ids=[batch_id], step=step, number=self.next())

    async def step(self, *requests: pb.DecodeRequest) -> list[Any]:
        """Each rank's answer to the last of some messages of one call, or its error."""

        async def ask(rank: ShardService) -> pb.StepResponse:
            return [answer async for answer in rank.Decode(_stream(requests), None)][-1]

        calls = [ask(rank) for rank in self.ranks]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def clear(self) -> list[Any]:
        """Clear all batches."""
        self._num_blocks = 0
        return await self.all("ClearCache", pb.ClearCacheRequest(number=self.next()))

    def close(self) -> None:
        """End all threads."""
        for rank in self.ranks:
            rank._engine.stop()
            rank.close()


async def _stream(requests: Sequence[pb.DecodeRequest]) -> AsyncIterator[pb.DecodeRequest]:
    for request in requests:
        yield request


@pytest.fixture
async def shards(tiny_model_path: Path) -> AsyncIterator[Shards]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shards = Shards(tiny_model_path, 2)
    try:
        await shards.warm_up()
        yield shards
    finally:
        shards.close()
        torch.set_num_threads(threads)


def fail_once(
    engine: Engine, error: BaseException, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Make the next step fail on this rank only: before it is planned, while it is planned, or
    after all ranks have computed it."""
    owner: Any = engine if moment == "unplanned" else StepRunner
    plain = owner.launch

    def launch(*given: Any) -> Any:
        if moment != "unplanned" and given[0] is not engine._steps:
            return plain(*given)
        monkeypatch.setattr(owner, "launch", plain)
        if moment == "computed":
            plain(*given)
        raise error

    monkeypatch.setattr(owner, "launch", launch)


async def run(shards: Shards, joins: Callable[[Shards], None] | None = None) -> dict[str, Any]:
    """Run a sampled text, a repetitive one with draft tokens, and one with a grammar, to their
    ends; the latter two join the first after a step that `joins` breaks. Returns tokens by request,
    and each step's digests by rank."""
    first = shards.request(1, range(10, 37), do_sample=True, bias=FEW, top_n_tokens=2)
    later = first.block_table[2:4]
    del first.block_table[2:]
    grown: dict[str, Any] = {"grown": [(1, block) for block in later], "speculate": 3}
    second = [
        shards.request(2, [7, 6, 5] * 6, bias=FEW, do_sample=True),
        shards.request(3, range(40, 50), grammar=WORDS, do_sample=True, max_new_tokens=60),
    ]
    tokens: dict[str, Any] = {"1": [], "2": [], "3": [], "proofs": [], "drafted": False}

    def note(answers: Sequence[Any]) -> pb.StepResponse:
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        found: pb.Generations = answers[0].generations
        tokens["drafted"] |= bool(found.token_counts)
        ids, counts = iter(found.token_ids), found.token_counts or [1] * len(found.request_ids)
        for request_id, count in zip(found.request_ids, counts, strict=True):
            tokens[str(request_id)] += [next(ids) for _ in range(count)]
        tokens["proofs"].append([answer.digest for answer in answers])
        for answer in answers[1:]:
            assert not answer.HasField("generations") and not answer.HasField("batch")
            assert answer.total_ns > 0
        response: pb.StepResponse = answers[0]
        return response

    note(await shards.all("Prefill", shards.prefill([first])))
    note(await shards.step(shards.decode(1)))
    unlucky = [shards.request(9, range(5, 25))]
    if joins is not None:
        joins(shards)
        tokens["errors"] = await shards.all("Prefill", shards.prefill(unlucky, 1, **grown))
        grown = {"speculate": 3}
        # What they draft next must be the same.
        states = [vars(rank._engine._drafter) for rank in shards.ranks]
        for name in ("_rate", "_backoff", "_last_backoff", "_misses"):
            assert states[0][name].tolist() == states[1][name].tolist()
    answer = note(await shards.all("Prefill", shards.prefill(second, 1, **grown)))
    while answer.batch.request_ids:
        answer = note(await shards.step(shards.decode(1, speculate=3)))
    return tokens


async def alone(path: Path) -> dict[str, Any]:
    """The tokens with one shard."""
    shards = Shards(path, 1)
    await shards.warm_up()
    try:
        return await run(shards)
    finally:
        shards.close()


async def test_two_ranks_choose_what_one_does_and_prove_it(
    shards: Shards, tiny_model_path: Path
) -> None:
    expected = await alone(tiny_model_path)
    assert len(expected["1"]) == len(expected["2"]) == 20 and expected["3"] and expected["drafted"]
    found = await run(shards)
    proofs = found.pop("proofs")
    assert found == {name: expected[name] for name in found}
    assert all(len(set(pair)) == 1 for pair in proofs) and len({pair[0] for pair in proofs}) > 20
    assert expected["proofs"] == [[0]] * len(expected["proofs"])
    [info] = {(await rank.Info(None, None)).last_number for rank in shards.ranks}
    assert info == shards.number


@pytest.mark.parametrize("moment", ["unplanned", "planned"])
async def test_a_rank_that_fails_takes_the_step_with_it_and_nothing_else(
    shards: Shards, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def joins(shards: Shards) -> None:
        fail_once(shards.ranks[1]._engine, MemoryError("none left"), monkeypatch, moment)

    expected = await alone(tiny_model_path)
    found = await run(shards, joins)
    given_up, own = found["errors"]
    assert isinstance(own, MemoryError)
    assert isinstance(given_up, RankError) and not given_up.is_final
    assert "shard 1 has aborted" in str(given_up)
    assert [found[name] for name in "123"] == [expected[name] for name in "123"]
    assert not shards.final


async def test_a_step_that_one_rank_has_done_and_another_not(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message sent ahead needs state that this rank lacks; the router clears the batch."""
    fail_once(shards.ranks[1]._engine, MemoryError("none left"), monkeypatch, "computed")
    request = shards.request(1, range(3, 30))
    done, error = await shards.all("Prefill", shards.prefill([request]))
    assert done.batch.request_ids == [1] and isinstance(error, MemoryError)
    errors = await shards.step(shards.decode(1, is_ahead=True))
    assert "shard 1 has aborted" in str(errors[0])
    assert "the step before this one has failed" in str(errors[1])
    await shards.clear()
    assert not shards.final and all(not rank._engine.num_rows_taken for rank in shards.ranks)


async def test_a_wrong_message_is_no_failure_of_a_rank(shards: Shards) -> None:
    def fail(number: int) -> None:
        raise AssertionError("all ranks know by themselves")

    for rank in shards.ranks:
        rank._engine.world.collectives.fail = fail  # type: ignore[method-assign]
    errors = await shards.step(shards.decode(5))
    assert [str(error) for error in errors] == ["Batch ID 5 not found in cache."] * 2
    answers = await shards.step(shards.decode(5, is_ahead=True))
    assert [str(error) for error in answers] == ["the step before this one has failed"] * 2


async def test_a_wrong_token_is_found_in_its_step(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = shards.request(1, range(3, 30))
    same = await shards.all("Prefill", shards.prefill([request]))
    assert same[0].digest == same[1].digest != 0
    engine = shards.ranks[1]._engine
    write = engine._write

    def write_another(self: Engine, part: Any) -> pb.StepResponse:
        part.output.generations.token_ids[0] += 1
        return write(part)

    monkeypatch.setattr(engine, "_write", MethodType(write_another, engine))
    other = await shards.step(shards.decode(1))
    assert other[0].digest != other[1].digest


async def test_a_rank_that_does_not_come_is_final(shards: Shards) -> None:
    prefill = shards.prefill([shards.request(1, range(3, 30))])
    with pytest.raises(RankError, match="shard 1 did not come within 1"):
        await shards.ranks[0].Prefill(prefill, None)
    assert [error.is_final for error in shards.final] == [True]


async def test_all_ranks_have_the_blocks_of_the_one_with_least_room(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(tiny_model_path, 2)
    device: Any = shards.ranks[1]._engine.device
    plenty = device.free_bytes
    monkeypatch.setattr(device, "free_bytes", lambda *given: plenty(*given)._replace(cache=1 << 20))
    try:
        sizes = [answer.num_blocks for answer in await shards.warm_up(64)]
    finally:
        shards.close()
    assert sizes[0] == sizes[1] < 64 * 96 // shards.ranks[0]._engine.block_size


async def test_a_grammar_that_went_on_in_a_lost_step_ends(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 follows it, and has advanced it when another rank fails."""
    request = shards.request(3, range(40, 50), grammar=WORDS, max_new_tokens=60)
    await shards.all("Prefill", shards.prefill([request]))
    fail_once(shards.ranks[1]._engine, MemoryError("none left"), monkeypatch, "computed")
    errors = await shards.all("Prefill", shards.prefill([shards.request(4, range(9))], 3))
    assert [type(error) for error in errors] == [RankError, MemoryError]
    answers = await shards.step(shards.decode(3))
    [failed] = answers[0].errors
    assert failed.request_id == 3 and "has failed on another shard" in failed.message
    assert answers[0].digest == answers[1].digest and not answers[0].batch.request_ids
