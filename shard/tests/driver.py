"""Drives an Engine like a router: allocates blocks, joins, steps, filters. If the device runs
behind, another step is in flight behind the requested one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from text_generation_process.flags import ShardConfig
from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from text_generation_shard.device import open_device
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.cpu.runner import sample
from text_generation_shard.device.reference.device import Device
from text_generation_shard.engine.engine import Engine, StepHandle
from text_generation_shard.engine.planner import Costs
from text_generation_shard.engine.warmup import warm_up
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    compile_tried,
    try_text,
)
from text_generation_shard.models.registry import read_config
from text_generation_shard.parallel import World
from text_generation_shard.server import load_engine as load
from text_generation_shard.server import load_on

from shard.tests.stream_device import stream_over

NUM_BLOCKS = 400
DEVICES = ["cpu", "stream"]
"""What `load_engine` loads on: steps one after another, and with one under way behind another."""


def load_engine(
    path: Path,
    max_prefill_tokens: int = 4096,
    device: Device | str = "cpu",
    world: World | None = None,
    max_batch_size: int = 64,
    max_total_tokens: int = 400,
    **config: Any,
) -> Engine:
    """A warm engine with these rows and NUM_BLOCKS blocks. On `cpu`, or on `stream`: the same with
    the runner of a GPU."""
    settings = ShardConfig(model_path=path, **{"dtype": "float32", **config})
    if device == "stream":
        device = stream_over(open_cpu(settings.dtype, settings.quantize), sample)
    if isinstance(device, str):
        engine = load(replace(settings, device=device))
    else:
        engine = load_on(device, settings, read_config(settings), world or World())
    warm_up(
        engine,
        limits_of(
            max_prefill_tokens,
            max_batch_size,
            max_total_tokens=max_total_tokens,
            max_batch_total_tokens=NUM_BLOCKS * engine.block_size,
        ),
    )
    # Draft tokens pay nearly always, however fast this machine is.
    engine._planner.costs = Costs(10**6, 10**6, 1, 0)
    return engine


def limits_of(max_prefill_tokens: int, max_batch_size: int, **others: int) -> pb.WarmupRequest:
    """The limits for a warm-up."""
    return pb.WarmupRequest(
        max_prefill_tokens=max_prefill_tokens, max_batch_size=max_batch_size, **others
    )


def new_request(
    request_id: int,
    ids: Sequence[int],
    block_table: Sequence[int],
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> pb.Request:
    """A request as a router sends it. sampling: fields of `Sampling`."""
    stopping = pb.StoppingCriteriaParameters(
        max_new_tokens=options.pop("max_new_tokens", 8),
        min_new_tokens=options.pop("min_new_tokens", 0),
        ignore_eos_token=options.pop("ignore_eos_token", False),
        stop_token_ids=options.pop("stop_token_ids", ()),
    )
    return pb.Request(
        id=request_id,
        input_ids=ids,
        num_prompt_tokens=options.pop("num_prompt_tokens", len(ids)),
        block_table=block_table,
        parameters=pb.NextTokenChooserParameters(**Sampling(**(sampling or {})).to_wire()),
        stopping_parameters=stopping,
        **options,
    )


def changed(request: pb.Request, **fields: Any) -> pb.Request:
    """A copy with other values of these fields."""
    copy = pb.Request()
    copy.CopyFrom(request)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(pb.Request(**fields))
    return copy


def step_of(
    engine: Engine,
    requests: Sequence[pb.Request] = (),
    runs_on: bool = True,
    grown: Sequence[tuple[int, int]] = (),
    chunks: Mapping[int, int] | None = None,
    **options: Any,
) -> tuple[pb.Step, Sequence[pb.Request]]:
    """A step and its new requests. With `runs_on`, what runs and has its whole input decodes, but
    for what ends by length in the steps under way; chunks: how many tokens of which inputs, of new
    requests by default all."""
    table, parts = engine._table, dict(chunks or {})
    options.setdefault("is_ahead", bool(engine._in_flight))
    counts = {
        request_id: 1
        for request_id, row in table.running.items()
        if runs_on
        and table.lens[row] >= table.input_lens[row]
        and (not engine._in_flight or table.lens[row] + 1 < table.longest[row])
    }
    for request in requests:
        parts.setdefault(request.id, len(request.input_ids) - request.num_cached_tokens)
    counts |= parts
    step = pb.Step(
        request_ids=counts,
        counts=counts.values() if parts else (),
        grown_request_ids=[request_id for request_id, _ in grown],
        grown_block_ids=[block for _, block in grown],
        **options,
    )
    return step, requests


def prefill_of(
    engine: Engine, batch_id: int, requests: Sequence[pb.Request], cached_id: int | None = None
) -> pb.PrefillRequest:
    """The message of new requests, beside which nothing decodes."""
    step, new = step_of(engine, requests, runs_on=False)
    batch = pb.Batch(id=batch_id, requests=new)
    return pb.PrefillRequest(batch=batch, cached_batch_id=cached_id, step=step)


def compile_now(compiler: GrammarCompiler, text: str) -> Grammar:
    """Compile in this thread, without limits or the cache."""
    try:
        tokenizer = compiler._load()
    except GrammarError as error:
        return Grammar(str(error))
    return compile_tried(tokenizer, try_text(tokenizer, text))


def errors_of(output: pb.StepResponse) -> dict[int, str]:
    """The sentences of the requests that failed."""
    return {error.request_id: error.message for error in output.errors}


def open_cpu(dtype: str | None, quantize: str | None = None) -> Device:
    """The processor, for weights of these forms."""
    return open_device("cpu", DeviceOptions(dtype, "float32", quantize))


def reference_device(
    kind: Any = Device,
    dtype: torch.dtype = torch.float32,
    cuda_graphs: tuple[int, ...] | None = None,
) -> Any:
    """The specification, on the processor; or a StreamDevice over it."""
    given = torch.device("cpu"), dtype, DeviceOptions(None, "float32")
    if issubclass(kind, Device):
        return kind(*given)
    return kind(Device(*given), cuda_graphs=cuda_graphs)


@dataclass
class Driver:
    """Owns the free blocks, and what each request has generated."""

    engine: Engine
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    tables: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    prefill_logprobs: dict[int, list[float]] = field(default_factory=dict)
    prefill_ranks: dict[int, list[int]] = field(default_factory=dict)
    prefill_top_tokens: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    # Tokens of the inputs that are not computed yet.
    left: dict[int, int] = field(default_factory=dict)
    # Tokens of inputs that the first step computes, if not all; and the compiled grammars.
    firsts: dict[int, int] = field(default_factory=dict)
    grammars: dict[int, Grammar] = field(default_factory=dict)
    # The longest a request can become.
    longest: dict[int, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    # Launched behind the last one that was asked for: a decode of what runs.
    ahead: StepHandle | None = None

    def request(self, request_id: int, ids: Sequence[int], **options: Any) -> pb.Request:
        """A request with blocks for its ids and the token after them."""
        size = self.engine.block_size
        self.tables[request_id] = [self.free.pop() for _ in range((len(ids) + size) // size)]
        self.known[request_id] = list(ids)
        self.tokens.setdefault(request_id, [])
        self.logprobs.setdefault(request_id, [])
        grammar, chunk_len = options.pop("grammar", None), options.pop("chunk_len", 0)
        if grammar is not None:
            self.grammars[request_id] = grammar
        self.firsts.pop(request_id, None)
        if chunk_len:
            self.firsts[request_id] = chunk_len
        request = new_request(request_id, ids, self.tables[request_id], **options)
        most_new = request.stopping_parameters.max_new_tokens
        self.longest[request_id] = request.num_prompt_tokens + most_new
        return request

    def part(self, request: pb.Request, count: int) -> pb.Request:
        """Only `count` input tokens are computed in its first step; 0: all."""
        self.firsts[request.id] = count or len(request.input_ids) - request.num_cached_tokens
        return request

    def launch(self, requests: Sequence[pb.Request], **options: Any) -> StepHandle:
        """Launch a step with new requests; the options of `step_of`."""
        chunks = {
            request.id: self.firsts[request.id] for request in requests if request.id in self.firsts
        }
        chunks = {**options.pop("chunks", {}), **chunks}
        step, new = step_of(self.engine, requests, chunks=chunks, **options)
        return self.engine.launch(step, new, self.grammars)

    def add(
        self, requests: Sequence[pb.Request], advance: Mapping[str, Any] | None = None
    ) -> pb.StepResponse:
        """Prefill, joining the running batch, which `advance` advances in the same pass."""
        options = {"runs_on": False} if advance is None else advance
        handle = self.launch(requests, **options)
        self.settle()
        for request in requests:
            whole = len(request.input_ids) - request.num_cached_tokens
            self.left[request.id] = whole - self.firsts.get(request.id, whole)
        return self._take(handle.result(), options.get("chunks", {}))

    def step(self, chunks: Mapping[int, int] | None = None, speculate: int = 0) -> pb.StepResponse:
        """Decode everything that runs; `chunks`: how many more tokens of which inputs."""
        if chunks:
            handle = self.launch((), **self.advance(chunks, speculate))
            self.settle()
            return self._take(handle.result(), chunks)
        if self.ahead is None:
            self.ahead = self.launch((), **self.advance({}, speculate))
        return self._step_ahead(self.ahead, speculate)

    def _step_ahead(self, handle: StepHandle, speculate: int) -> pb.StepResponse:
        """The result of this decode; the next one is launched before it is known."""
        ahead = None
        if self.engine.device.runs_behind:
            try:
                ahead = self.launch((), **self.advance({}, speculate))
            except BatchError as error:
                # All that decode end in this one.
                assert "every request rests" in str(error)
        self.ahead = ahead
        try:
            result = self._take(handle.result(), {})
        except Exception:
            if ahead is not None and ahead.outcome is not None:
                self.ahead = None  # it is lost, too
            raise
        if not self.running:
            self.settle()
        return result

    def settle(self) -> None:
        """Collect the step in flight, if there is one."""
        handle, self.ahead = self.ahead, None
        if handle is not None:
            self._take(handle.result(), {})

    def advance(self, chunks: Mapping[int, int], speculate: int = 0) -> dict[str, Any]:
        """The options of `step_of` for the running requests, with new blocks."""
        grown, more = [], speculate
        if self.ahead is not None:
            # What a row gets there at most.
            more += max((self.ahead.plan.samples.ends - self.ahead.plan.samples.firsts).tolist())
        for request_id in self.running:
            table = self.tables[request_id]
            tokens = len(self.known[request_id])
            if not self.left[request_id]:
                tokens = min(tokens + more, self.longest[request_id])
            while tokens > len(table) * self.engine.block_size:
                table.append(self.free.pop())
                grown.append((request_id, table[-1]))
        return {"grown": grown, "chunks": chunks, "speculate": speculate}

    def drop(self, request_id: int) -> list[int]:
        """Filter a request out; returns its tokens, to resume it later."""
        self.settle()
        keep = [item for item in self.running if item != request_id]
        if keep:
            self.running = self.engine.filter(keep)
        else:
            self.engine.clear()
            self.running = []
        self.free += self.tables.pop(request_id)
        return self.known.pop(request_id)

    def run(self) -> None:
        """Decode until nothing runs."""
        while self.running:
            self.step()

    def _take(self, result: pb.StepResponse, chunks: Mapping[int, int]) -> pb.StepResponse:
        for request_id, count in chunks.items():
            self.left[request_id] -= count
        new = result.generations
        tokens = iter(zip(new.token_ids, new.logprobs, strict=True))
        counts = new.token_counts or [1] * len(new.request_ids)
        columns = zip(new.request_ids, counts, new.finish_reasons, strict=True)
        for request_id, count, reason in columns:
            assert not self.left[request_id], "only whose input is computed gets tokens"
            for token, logprob in islice(tokens, count):
                self.known[request_id].append(token)
                self.tokens[request_id].append(token)
                self.logprobs[request_id].append(logprob)
            if reason:
                self.reasons[request_id] = reason
                self.free += self.tables.pop(request_id)
        assert next(tokens, None) is None, "every token belongs to a request"
        for found in result.prefill_logprobs:
            self.prefill_logprobs[found.request_id] = list(found.logprobs)
            self.prefill_ranks[found.request_id] = list(found.ranks)
        for best in result.prefill_top_tokens:
            tops = zip(best.token_ids, best.logprobs, strict=True)
            self.prefill_top_tokens[best.request_id] = list(tops)
        self.running = list(result.batch.request_ids)
        return result
