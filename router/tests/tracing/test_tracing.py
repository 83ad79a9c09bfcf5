"""Which spans there are, on shards that are played. Over gRPC: integration_tests/test_traces.py."""

import asyncio
import random
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode
from text_generation_router.client.recovery import WatchedShards
from text_generation_router.errors import GenerationError
from text_generation_router.request import Request
from text_generation_router.tracing import requests as spans
from text_generation_router.tracing.requests import TracedRequests

from router.tests.scheduling import (
    Failing,
    FakeShards,
    Gate,
    Outcome,
    Rig,
    collect,
    make_request,
    running,
)
from router.tests.waiting import until

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
STEPS = [f"text_generation.v1.TextGenerationService/{method}" for method in ("Prefill", "Decode")]


class Kept(SpanProcessor):
    """The spans that began and those that ended, in order."""

    def __init__(self) -> None:
        self.begun: list[ReadableSpan] = []
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.begun.append(span)

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)

    def named(self, *names: str) -> list[ReadableSpan]:
        """Those that ended, of these names."""
        return [span for span in self.ended if span.name in names]


class Traced:
    """A router's traces, from requests to shards."""

    def __init__(self, ratio: float = 1.0) -> None:
        provider = TracerProvider(ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False)
        self.kept = Kept()
        provider.add_span_processor(self.kept)
        self.requests = TracedRequests(provider.get_tracer("test"), "a model")
        self.told: FakeShards

    def watched(self, shards: FakeShards) -> WatchedShards:
        """The traced shards, for the batcher."""
        self.told = shards
        return WatchedShards(shards, trace=self.requests.begin_step)

    async def ask(
        self, rig: Rig, *requests: Request, leaves: bool = False, parent: str = ""
    ) -> list[Outcome]:
        """What `Infer` and the application do for sequences of one HTTP request."""
        headers = [(b"traceparent", parent.encode())] if parent else []
        scope = {"method": "POST", "path": "/", "scheme": "http", "headers": headers}
        trace, arrival = self.requests.begin(scope), time.perf_counter()
        entries = rig.batcher.submit_many(requests, arrival)
        if trace is not None:
            trace.follow(entries)
        outcomes = []
        if leaves:
            await rig.turn(random.randrange(30))
        else:
            outcomes = list(await asyncio.gather(*(collect(entry) for entry in entries)))
        for entry in entries:
            rig.batcher.cancel(entry)
            if trace is not None:
                trace.end(entry, "dropped")
        if trace is not None:
            trace.close(scope)
        return outcomes

    def check_all_ended(self) -> None:
        """Every span ends once, and no state is kept of requests that have ended."""
        assert sorted(map(id, self.kept.begun)) == sorted(
            id(span) for span in self.kept.begun if span.end_time is not None
        )
        assert len(self.kept.begun) == len(self.kept.ended)
        assert not self.requests.sequences


def ids(span: ReadableSpan) -> tuple[int, int]:
    """Of a span its own id and that of the one above it, 0 if there is none."""
    return span.context.span_id, span.parent.span_id if span.parent is not None else 0


async def test_steps_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "EVERY_S", -1.0)
    traced = Traced()
    async with running(watched=traced.watched) as rig:
        await traced.ask(rig, make_request((1, 2, 3), 9))
    assert len(traced.kept.named(*STEPS)) == 9
    assert all(traced.told.trace_contexts)
    [decode] = traced.kept.named("decode")
    assert len(decode.links) == 2, "the first and the last"


async def test_a_step_of_several_is_linked() -> None:
    """The second request's first steps are linked with the first request, and below its own."""
    traced, gate = Traced(), Gate("decode")
    async with running(FakeShards(hook=gate), watched=traced.watched) as rig:
        tasks = [asyncio.create_task(traced.ask(rig, make_request((1, 2, 3), 9)))]
        await until(lambda: gate.is_reached)
        tasks.append(asyncio.create_task(traced.ask(rig, make_request((4, 5, 6), 9))))
        gate.open()
        await asyncio.gather(*tasks)
    traced.check_all_ended()
    kept = traced.kept
    first, second = kept.named("POST")
    of_second = [s for s in kept.named(STEPS[1]) if ids(s)[1] == ids(second)[0]]
    [*_, decode] = kept.named("decode")
    assert ids(first)[0] in [link.context.span_id for link in of_second[0].links]
    assert ids(of_second[0])[0] in [link.context.span_id for link in decode.links]
    assert first.context.trace_id != second.context.trace_id


async def test_a_step_names_only_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_LINKS", 2)
    traced = Traced()
    async with running(watched=traced.watched) as rig:
        await asyncio.gather(*(traced.ask(rig, make_request((1, 2, 3), 4)) for _ in range(6)))
    assert max(len(span.links) for span in traced.kept.named(*STEPS)) == 2
    assert all(span.links for span in traced.kept.named("prefill", "decode"))


async def test_a_step_that_fails() -> None:
    traced = Traced()
    async with running(FakeShards(hook=Failing(decode=[1])), watched=traced.watched) as rig:
        [outcome] = await traced.ask(rig, make_request())
        assert isinstance(outcome.error, GenerationError)
        [outcome] = await traced.ask(rig, make_request())
        assert outcome.error is None
    traced.check_all_ended()
    step = traced.kept.named(STEPS[1])[0]
    assert step.status.status_code is StatusCode.ERROR
    assert step.attributes["error.type"] == "GenerationError"
    assert traced.kept.named("decode")[0].status.status_code is StatusCode.ERROR
    assert traced.kept.named("decode")[1].status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_every_span_ends(seed: int) -> None:
    """Requests that are cancelled, fail, wait, are preempted, or have chunked prefills."""
    random.seed(seed)
    traced = Traced(ratio=0.7)
    shards = FakeShards(num_blocks=24, hook=Failing(prefill=[4, 9], decode=[7, 30], filter=[3]))
    limits: dict[str, Any] = {"max_batch_prefill_tokens": 8, "speculate": seed % 3}
    async with running(shards, watched=traced.watched, max_batch_size=6, **limits) as rig:
        tasks = []
        for _ in range(40):
            prompt = [random.randrange(1, 99) for _ in range(random.randrange(1, 20))]
            num = random.choice((1, 1, 2, 3))
            requests = [make_request(prompt, random.randrange(1, 12))] * num
            leaves = random.random() < 0.3
            tasks.append(asyncio.create_task(traced.ask(rig, *requests, leaves=leaves)))
            await rig.turn(random.randrange(12))
        await asyncio.gather(*tasks)
    traced.check_all_ended()
    kept = traced.kept
    steps_by_id = {ids(span)[0] for span in kept.named(*STEPS)}
    for phase in kept.named("prefill", "decode"):
        assert {link.context.span_id for link in phase.links} <= steps_by_id
    good = [s for s in kept.named("prefill") if s.status.status_code is StatusCode.UNSET]
    assert len(good) > 10
    assert all(span.links for span in good)
