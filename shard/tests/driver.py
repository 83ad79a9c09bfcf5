"""Drives an Engine as a router would: gives out blocks, joins, steps, filters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from text_generation_shard.batch import RowRequest
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.sampling import SamplingParams
from text_generation_shard.step import StepResult, WarmupLimits

NUM_BLOCKS = 400


def load_engine(path: Path, max_prefill_tokens: int = 4096, **config: Any) -> Engine:
    """An engine that is warm, with room for 64 rows and NUM_BLOCKS blocks."""
    engine = Engine(ShardConfig(model_path=path, **{"device": "cpu", "dtype": "float32", **config}))
    engine.warmup(
        WarmupLimits(
            max_prefill_tokens=max_prefill_tokens,
            max_batch_size=64,
            max_total_tokens=400,
            max_batch_total_tokens=NUM_BLOCKS * engine.block_size,
        )
    )
    return engine


@dataclass
class Driver:
    """Knows which blocks are free and what each request has generated."""

    engine: Engine
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    tables: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    prefill_logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    batch_id: int | None = None
    next_batch_id: int = 1

    def request(self, request_id: int, ids: Sequence[int], **options: Any) -> RowRequest:
        """A request with blocks for its ids and the token after them."""
        size = self.engine.block_size
        self.tables[request_id] = [self.free.pop() for _ in range((len(ids) + size) // size)]
        self.known[request_id] = list(ids)
        self.tokens.setdefault(request_id, [])
        self.logprobs.setdefault(request_id, [])
        sampling = SamplingParams(**options.pop("sampling", {}))
        return RowRequest(
            id=request_id,
            input_ids=list(ids),
            num_prompt_tokens=options.pop("num_prompt_tokens", len(ids)),
            num_cached_tokens=0,
            block_table=list(self.tables[request_id]),
            sampling=sampling,
            **{"max_new_tokens": 8, **options},
        )

    def add(self, requests: Sequence[RowRequest]) -> StepResult:
        """Prefill, joining what runs."""
        self.next_batch_id += 1
        return self._take(self.engine.prefill(self.next_batch_id, requests, self.batch_id))

    def step(self) -> StepResult:
        """Decode everything that runs."""
        assert self.batch_id is not None
        grown = []
        for request_id in self.running:
            table = self.tables[request_id]
            if len(self.known[request_id]) > len(table) * self.engine.block_size:
                table.append(self.free.pop())
                grown.append((request_id, table[-1]))
        return self._take(self.engine.decode([self.batch_id], grown))

    def drop(self, request_id: int) -> list[int]:
        """Filter a request out; what it knew, for coming back."""
        assert self.batch_id is not None
        keep = [item for item in self.running if item != request_id]
        if keep:
            self.running = self.engine.filter(self.batch_id, keep)
        else:
            self.engine.clear(self.batch_id)
            self.running, self.batch_id = [], None
        self.free += self.tables.pop(request_id)
        return self.known.pop(request_id)

    def run(self) -> None:
        """Decode until nothing runs."""
        while self.running:
            self.step()

    def _take(self, result: StepResult) -> StepResult:
        columns = (result.request_ids, result.token_ids, result.logprobs, result.finish_reasons)
        for request_id, token, logprob, reason in zip(*columns, strict=True):
            self.known[request_id].append(token)
            self.tokens[request_id].append(token)
            self.logprobs[request_id].append(logprob)
            if reason:
                self.reasons[request_id] = reason
                self.free += self.tables.pop(request_id)
        self.prefill_logprobs.update(result.prefill_logprobs)
        self.running = list(result.running_ids)
        self.batch_id = result.batch_id if self.running else None
        return result
