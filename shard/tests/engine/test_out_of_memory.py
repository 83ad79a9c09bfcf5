"""Steps that run out of memory: all requests get the same tokens as with enough memory, and only a
request that does not fit alone fails."""

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_proto import pb
from text_generation_shard.device.base import ForwardBatch, ScheduledTokens
from text_generation_shard.device.reference.device import Device
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.planner import Plan
from text_generation_shard.engine.step import StepRunner
from text_generation_shard.grammars.grammar import GrammarCompiler
from text_generation_shard.sampling import Choice, top_tokens
from torch import Tensor

from shard.tests.driver import (
    Driver,
    changed,
    compile_now,
    errors_of,
    load_engine,
    reference_device,
    step_of,
)
from shard.tests.engine.test_engine_behind import tokens_of
from shard.tests.engine.test_mixed_steps import make_wanted, run_mixed
from shard.tests.stream_device import StreamDevice

BAD = 77
"""A pass with this token always runs out of memory."""
LONG: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos_token": True}
# Where a device can run out of memory.
PLACES = [
    (Device, "forward"),
    (StreamDevice, "forward"),
    (StreamDevice, "logits"),
    (StreamDevice, "result"),
]


@pytest.fixture(scope="module")
def loaded(tiny_model_path: Path) -> dict[type[Device], Engine]:
    # Without graphs: a recorded step allocates no memory.
    return {
        kind: load_engine(tiny_model_path, device=reference_device(kind, cuda_graphs=()))
        for kind in (Device, StreamDevice)
    }


@pytest.fixture
def engines(loaded: dict[type[Device], Engine]) -> dict[type[Device], Engine]:
    """By device; without running requests."""
    for engine in loaded.values():
        engine.clear()
    return loaded


class Memory:
    """Limits an engine's memory: passes have at most `most` tokens, and half as many scores. A
    larger pass, or one with the token `bad`, runs out of memory at `place`. Asserts that nothing of
    such a pass is held afterwards."""

    def __init__(
        self,
        engine: Engine,
        patch: pytest.MonkeyPatch,
        place: str = "forward",
        most: int = 400,
        bad: int | None = None,
    ) -> None:
        self.most, self.num_short, self.num_released = most, 0, 0
        self._place, self._is_short, self._bad = place, False, bad
        self._held: list[weakref.ref[Tensor]] = []
        runner: Any = engine.runner
        self._launch = StepRunner.launch
        self._forward, self._logits = engine.model.forward, engine.model.logits
        patch.setattr(StepRunner, "launch", lambda steps, plan: self.launch(steps, plan))
        patch.setattr(engine.model, "forward", self.forward)
        patch.setattr(engine.model, "logits", self.logits)
        patch.setattr(engine.device, "release_memory", self.release)
        if place == "choice":
            self._begin = runner.begin
            patch.setattr(runner, "begin", self.begin)

    def release(self) -> None:
        self.num_released += 1
        assert not any(held() is not None for held in self._held)

    def _check(self, place: str, held: Tensor) -> None:
        if self._is_short and place == self._place:
            self._held.append(weakref.ref(held))
            self.num_short += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    def _is_large(self, num_tokens: int, num_scores: int) -> bool:
        return num_tokens > self.most or num_scores > max(1, self.most // 2)

    def launch(self, steps: StepRunner, plan: Plan) -> Any:
        self._is_short = self._place == "launch" and any(
            self._is_large(int(item.counts.sum()), int(item.num_sampled.sum()))
            for item in plan.passes
        )
        self._check("launch", torch.empty(0))
        launched = self._launch(steps, plan)
        if not (self._is_short and self._place == "result"):
            return launched

        def result() -> Any:
            found = launched.result()
            self._is_short = True
            self._check("result", found.choice.scores if found.choice else torch.empty(0))

        return SimpleNamespace(wait=launched.wait, choose=launched.choose, result=result)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = self._forward(batch)
        wanted = batch.logits_indices
        num_scores = len(hidden) if wanted is None else len(wanted)
        is_large = self._is_large(len(hidden), num_scores)
        self._is_short |= is_large or self._bad in batch.input_ids.tolist()
        self._check("forward", hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._check("logits", hidden)
        return self._logits(hidden)

    def begin(self, scores: Tensor, *rest: Any) -> Tensor:
        self._check("choice", scores)
        return self._begin(scores, *rest)


# With longrope a row that comes back has another input, by whose length its prompt is rotated.
@pytest.mark.parametrize(
    ("family", "has_same_prompts"), [("llama3", True), ("phi3-longrope", False)]
)
def test_the_same_tokens_with_little_memory(
    family: str,
    has_same_prompts: bool,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunked prompts, draft tokens, penalties, seeds, log-probabilities, preempted rows, and with
    longrope recomputed rows; bit for bit if products do not depend on the batch."""
    engine = load_engine(checkpoint(family), 40)
    draw = random.Random(1)
    requests = make_wanted(Driver(engine), draw, 14)
    memory, driver = Memory(engine, monkeypatch, "launch", most=7), Driver(engine)
    run_mixed(driver, requests, draw)
    for number, wanted in enumerate(requests):
        assert driver.tokens[number] == wanted.tokens
        assert driver.reasons[number] == wanted.reason
        if not has_same_prompts:
            continue
        assert driver.logprobs[number] == wanted.logprobs
        served = driver.prefill_logprobs.get(number, [])
        assert served[1 : len(wanted.ids)] == wanted.prefill_logprobs[1:]
    assert engine.num_rows_taken == 0 and not engine._table.prompt_outputs
    assert sorted(driver.free) == list(range(len(driver.free)))
    assert memory.num_released >= memory.num_short > 200


@pytest.mark.parametrize("place", ["forward", "logits", "choice", "result"])
def test_steps_ahead_are_computed_behind_it(
    place: str, engines: dict[type[Device], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Driver(engines[Device])
    expected = tokens_of(plain, behind=False)
    engine = engines[StreamDevice]
    memory, driver = Memory(engine, monkeypatch, place, most=3), Driver(engine)
    assert tokens_of(driver, behind=True) == expected
    assert driver.reasons == plain.reasons and engine.num_rows_taken == 0
    assert memory.num_short > 10


def test_a_row_that_fails_is_not_in_the_steps_behind(
    engines: dict[type[Device], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives with one of them is not affected."""
    engine = engines[StreamDevice]
    driver = Driver(engine)
    alone, late = range(3, 12), range(30, 50)
    for number, ids in ((0, alone), (3, late)):
        driver.add([driver.request(number, ids, **LONG)])
        driver.run()
    Memory(engine, monkeypatch, "result", bad=BAD)
    bad = {**LONG, "sampling": {"logit_bias": ((BAD, 1000.0),)}}
    first = [driver.request(1, alone, **LONG), driver.request(2, range(50, 60), **bad)]
    handles = [engine.launch(*step_of(engine, first, runs_on=False))]
    in_parts = driver.request(3, late, **LONG)
    handles += [
        engine.launch(*step_of(engine)),
        engine.launch(*step_of(engine, [in_parts], chunks={3: 5})),
    ]
    outputs = [handle.result() for handle in handles]
    assert [item.generations.request_ids for item in outputs] == [[1, 2], [1, 2], [1]]
    assert [item.batch.request_ids for item in outputs] == [[1, 2], [1], [1, 3]]
    assert outputs[1].generations.finish_reasons == [pb.FINISH_REASON_NONE, pb.FINISH_REASON_ERROR]
    [(number, sentence)] = errors_of(outputs[1]).items()
    assert number == 2 and "not enough memory" in sentence and "--max-batch-total" in sentence
    tokens = [item.generations.token_ids[0] for item in outputs]
    driver.tokens[1], driver.running, driver.left = tokens, [1, 3], {1: 0, 3: 15}
    driver.known[1] += tokens
    driver.tokens[3] = []
    driver.step({3: 15})
    driver.run()
    assert driver.tokens[1] == driver.tokens[0] and len(driver.tokens[3]) == 9
    assert engine.num_rows_taken == 0


@pytest.mark.parametrize(("kind", "place"), PLACES)
@pytest.mark.parametrize("chunk_len", [0, 20])
def test_a_request_that_does_not_fit_alone_fails_alone(
    kind: type[Device],
    place: str,
    chunk_len: int,
    engines: dict[type[Device], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its whole prompt in the step, or with a chunk that samples no token."""
    driver = Driver(engines[kind])
    ids, other = list(range(3, 43)), list(range(80, 110))
    for number, prompt in ((0, ids), (1, other)):
        driver.add([driver.request(number, prompt, **LONG)])
        driver.run()
    memory = Memory(driver.engine, monkeypatch, place, bad=BAD)
    driver.add([driver.request(2, ids, **LONG)])
    bad = [5] * 14 + [BAD] + [6] * 30
    new = [
        driver.request(3, bad, prefill_logprobs=True, chunk_len=chunk_len, **LONG),
        driver.request(4, other, **LONG),
    ]
    result = driver.launch(new, **driver.advance({})).result()
    [(number, sentence)] = errors_of(result).items()
    assert number == 3 and "behind 14 of its tokens" in sentence
    new = result.generations
    whole = dict(zip(new.request_ids, new.finish_reasons, strict=True))
    failed = {} if chunk_len else {3: pb.FINISH_REASON_ERROR}
    assert whole == {2: pb.FINISH_REASON_NONE, 4: pb.FINISH_REASON_NONE, **failed}
    assert result.batch.request_ids == [2, 4] and driver.engine.num_rows_taken == 2
    driver.left |= {4: 0}
    for request_id, token in zip(new.request_ids, new.token_ids, strict=True):
        driver.tokens[request_id].append(token)
        driver.known[request_id].append(token)
    driver.running = [2, 4]
    driver.run()
    assert driver.tokens[2] == driver.tokens[0] and driver.tokens[4] == driver.tokens[1]
    assert memory.num_short > 5


def test_a_row_computes_the_shared_blocks_that_a_failed_row_was_to_write(
    engines: dict[type[Device], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(engines[Device])
    ids = list(range(3, 60))
    driver.add([driver.request(0, ids, **LONG)])
    driver.run()
    driver.add([driver.request(5, [9, 8], **LONG)])

    runner: Any = driver.engine.runner
    scores = runner.scores

    def no_memory(rows: Any, scheduled: ScheduledTokens, *rest: Any) -> Any:
        if 1 in rows.ids(scheduled.rows.tolist()):
            raise MemoryError
        return scores(rows, scheduled, *rest)

    monkeypatch.setattr(runner, "scores", no_memory)
    # Blocks that were not written.
    driver.free.reverse()
    # There is never memory for it; the others have its first two blocks.
    leader = driver.request(1, ids, **LONG)
    others = [driver.request(number, ids, **LONG) for number in (2, 3)]
    others = [
        changed(
            item,
            block_table=[*leader.block_table[:2], *item.block_table[2:]],
            num_cached_tokens=32,
        )
        for item in others
    ]
    result = driver.engine.step(*step_of(driver.engine, [leader, *others], chunks={3: 10}))
    assert list(errors_of(result)) == [1]
    new = result.generations
    assert dict(zip(new.request_ids, new.token_ids, strict=True))[2] == driver.tokens[0][0]
    new = driver.engine.step(*step_of(driver.engine, chunks={3: 15})).generations
    assert dict(zip(new.request_ids, new.token_ids, strict=True)) == {
        5: new.token_ids[0],
        2: driver.tokens[0][1],
        3: driver.tokens[0][0],
    }


@pytest.mark.parametrize("kind", [Device, StreamDevice])
def test_grammars_and_their_neighbours(
    kind: type[Device],
    engines: dict[type[Device], Engine],
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engines[kind]
    model = engine.model.config
    compiler = GrammarCompiler(tiny_model_path, model.vocab_size, model.eos_token_ids)
    try:
        grammar = compile_now(compiler, "start: /([0-4]{3} )+/")
    finally:
        compiler.close()
    drawn = {"do_sample": True, "temperature": 1.5}

    def tokens(driver: Driver) -> list[list[int]]:
        driver.add(
            [
                driver.request(
                    number,
                    range(3, 14 + number),
                    max_new_tokens=14,
                    grammar=None if number == 1 else grammar,
                    sampling={**drawn, "seed": number},
                )
                for number in range(4)
            ]
        )
        while driver.running:
            driver.step(speculate=3)
        return [driver.tokens[number] for number in range(4)]

    expected = tokens(Driver(engine))
    memory = Memory(engine, monkeypatch, most=2)
    assert tokens(Driver(engine)) == expected
    assert memory.num_short > 10


def test_top_tokens_are_found_on_the_host_where_the_device_has_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.tensor([[0.5, 2.0, 1.0, 2.0]])
    choice = Choice(np.array([1]), np.zeros(1, dtype=np.float32), scores)
    expected, topk, calls = top_tokens(choice, 0, 2), Tensor.topk, 0

    def no_memory(self: Tensor, count: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return topk(self, count)

    monkeypatch.setattr(Tensor, "topk", no_memory)
    assert top_tokens(choice, 0, 2) == expected and calls == 2
