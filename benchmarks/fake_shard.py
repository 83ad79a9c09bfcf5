"""A shard without a model: answers every step at once with a fixed text, for benchmarks/router.py.

A real gRPC server on a real unix socket that implements generate.proto, so that the router under
measurement runs unchanged.
"""

import argparse
import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from text_generation_proto import pb, pb_grpc

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 20
MAX_MODEL_LEN = 8192
# Log-probabilities to repeat; float32, as a shard's are.
LOGPROBS = [-((place * 7919 % 997) + 1) / 331 for place in range(997)]


@dataclass(slots=True)
class Row:
    """One request: the rest of its prompt, its tokens so far and its length."""

    num_unread: int
    num_tokens: int
    max_new_tokens: int


@dataclass(slots=True)
class Columns:
    """The tokens of one step, as `Generations` has them."""

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[pb.FinishReason] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)


class FakeShard(pb_grpc.TextGenerationServiceServicer):
    """Owns the rows. Every request repeats `text` until its `max_new_tokens`; of the router's
    drafts, `accepted` tokens per step are right."""

    def __init__(self, url: str, text: list[int], accepted: int) -> None:
        self._url = url
        self._text = text
        self._accepted = accepted
        self._batches: dict[int, dict[int, Row]] = {}
        self._logprobs = itertools.cycle(LOGPROBS)

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """A model of one shard on a CPU."""
        return pb.InfoResponse(
            dtype="float32",
            device_type="cpu",
            block_size=BLOCK_SIZE,
            attention_impl="fake",
            vocab_size=1 << 18,
            max_model_len=MAX_MODEL_LEN,
            version="0",
            rank=0,
            world_size=1,
        )

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Any
    ) -> pb.ServiceDiscoveryResponse:
        """Itself."""
        return pb.ServiceDiscoveryResponse(urls=[self._url])

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        """Enough blocks for all requests, and steps of at most a millisecond."""
        return pb.WarmupResponse(
            num_blocks=NUM_BLOCKS,
            max_input_tokens=request.max_input_tokens or MAX_MODEL_LEN - 1,
            max_total_tokens=request.max_total_tokens or MAX_MODEL_LEN,
            decode_step_ns=1_000_000,
            prefill_token_ns=100,
            prefill_context_ns=0,
        )

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        """Always healthy."""
        return pb.HealthResponse()

    async def ClearCache(
        self, request: pb.ClearCacheRequest, context: Any
    ) -> pb.ClearCacheResponse:
        """Forgets rows."""
        if request.HasField("id"):
            self._batches.pop(request.id, None)
        else:
            self._batches.clear()
        return pb.ClearCacheResponse()

    async def FilterBatch(
        self, request: pb.FilterBatchRequest, context: Any
    ) -> pb.FilterBatchResponse:
        """Keeps the rows named."""
        rows = self._batches[request.batch_id]
        self._batches[request.batch_id] = {kept: rows[kept] for kept in request.request_ids}
        batch = pb.CachedBatch(id=request.batch_id, request_ids=request.request_ids)
        return pb.FilterBatchResponse(batch=batch)

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.StepResponse:
        """Adds rows; the cached ones take a step too if the call says so."""
        joins = request.HasField("cached_batch_id")
        batch_id = request.cached_batch_id if joins else request.batch.id
        rows = self._batches.setdefault(batch_id, {})
        columns = Columns()
        for new in request.batch.requests:
            stopping = new.stopping_parameters
            num_inputs = len(new.input_ids)
            rows[new.id] = Row(
                num_inputs - new.num_cached_tokens,
                num_inputs - new.num_prompt_tokens,
                stopping.max_new_tokens,
            )
        self._compute(rows, request.step, columns)
        return self._answer(batch_id, columns)

    async def Decode(
        self, requests: AsyncIterator[pb.DecodeRequest], context: Any
    ) -> AsyncIterator[pb.StepResponse]:
        """One step per message; the batches become one."""
        async for request in requests:
            batch_id, *others = request.batch_ids
            rows = self._batches[batch_id]
            for other in others:
                rows |= self._batches.pop(other)
            columns = Columns()
            self._compute(rows, request.step, columns)
            yield self._answer(batch_id, columns)

    async def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: Any
    ) -> pb.CompileGrammarResponse:
        """Accepts any grammar; the text does not follow it."""
        return pb.CompileGrammarResponse(min_tokens=1)

    def _compute(self, rows: dict[int, Row], step: pb.Step, columns: Columns) -> None:
        num_new = 1 + min(self._accepted, step.speculate)
        counts = step.counts or [1] * len(step.request_ids)
        for request_id, count in zip(step.request_ids, counts, strict=True):
            row = rows.get(request_id)
            if row is None:
                continue  # it has ended in the step before
            if not row.num_unread:
                self._write(request_id, row, num_new, columns)
                continue
            row.num_unread -= count
            if not row.num_unread:
                self._write(request_id, row, 1, columns)

    def _write(self, request_id: int, row: Row, num_new: int, columns: Columns) -> None:
        num_new = min(num_new, row.max_new_tokens - row.num_tokens)
        text, place = self._text, row.num_tokens
        if num_new == 1:
            columns.token_ids.append(text[place % len(text)])
        else:
            columns.token_ids += [text[(place + i) % len(text)] for i in range(num_new)]
        row.num_tokens = place + num_new
        is_end = row.num_tokens == row.max_new_tokens
        columns.request_ids.append(request_id)
        columns.token_counts.append(num_new)
        columns.finish_reasons.append(pb.FINISH_REASON_LENGTH if is_end else pb.FINISH_REASON_NONE)

    def _answer(self, batch_id: int, columns: Columns) -> pb.StepResponse:
        rows = self._batches[batch_id]
        for request_id, reason in zip(columns.request_ids, columns.finish_reasons, strict=True):
            if reason:
                del rows[request_id]
        if not rows:
            del self._batches[batch_id]
        num_tokens = len(columns.token_ids)
        has_many = num_tokens > len(columns.request_ids)
        generations = pb.Generations(
            request_ids=columns.request_ids,
            token_ids=columns.token_ids,
            logprobs=itertools.islice(self._logprobs, num_tokens),
            finish_reasons=columns.finish_reasons,
            token_counts=columns.token_counts if has_many else (),
        )
        batch = pb.CachedBatch(id=batch_id, request_ids=rows) if rows else None
        return pb.StepResponse(generations=generations, batch=batch)


async def serve(uds_path: str, text: list[int], accepted: int) -> None:
    """Answers on `<uds-path>-0` until SIGTERM."""
    url = f"unix://{uds_path}-0"
    unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
    server = grpc.aio.server(options=unlimited)
    shard = FakeShard(url, text, accepted)
    pb_grpc.add_TextGenerationServiceServicer_to_server(shard, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(url)
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(grace=None)


def main() -> None:
    """Serves with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uds-path", required=True)
    parser.add_argument("--token-ids", type=int, nargs="+", required=True, help="the text")
    parser.add_argument("--accepted", type=int, default=0, help="right draft tokens a step")
    options = parser.parse_args()
    uvloop.run(serve(options.uds_path, options.token_ids, options.accepted))


if __name__ == "__main__":
    main()
