"""Times prefill and decode of batches, directly on the shards, and their report."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from text_generation_process.sampling import Sampling
from text_generation_router.client.ranks import ShardInfo
from text_generation_router.client.shards import ShardedClient
from text_generation_router.request import GenerateParameters, Request
from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import Plan
from text_generation_router.text.tokenizer import Tokenizer

from text_generation_benchmark import BenchmarkError
from text_generation_benchmark.report import Spread, as_dicts, spreads, table

STEPS = {
    "prefill": "Prefill",
    "decode_token": "Decode (token)",
    "decode_total": "Decode (total)",
}
"""What is timed, and the titles in the report."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a batch: rows, prompt tokens and generated tokens of each row."""

    batch_size: int
    sequence_length: int
    decode_length: int

    @property
    def num_prompt_tokens(self) -> int:
        """Of the whole batch."""
        return self.batch_size * self.sequence_length


@dataclass(frozen=True, slots=True)
class Run:
    """The times of one batch, in seconds."""

    prefill_s: float
    decode_s: tuple[float, ...]
    """Of each step after the prefill, which gives the first tokens."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The sampling of tokens."""

    sampling: Sampling
    top_n_tokens: int = 0


class Bench:
    """Runs batches on shards that no other client uses; owns their blocks.

    Prompts are random tokens, different in every run.
    """

    def __init__(
        self,
        shards: ShardedClient,
        tokenizer: Tokenizer,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        choice: Choice,
    ) -> None:
        """`shards` must be warm."""
        self._shards = shards
        self._tokenizer = tokenizer
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._choice = choice
        ids = range(min(vocab_size, tokenizer.vocab_size))
        self._ids = [token_id for token_id in ids if not tokenizer.is_special(token_id)]
        self._random = random.Random(0)
        self._next_id = 0

    def check(self, shape: Shape) -> None:
        """Raises BenchmarkError for a batch that the KV cache can not hold."""
        length = shape.sequence_length + shape.decode_length
        num_blocks = shape.batch_size * -(-length // self._block_size)
        if num_blocks > self._num_blocks:
            raise BenchmarkError(
                f"a batch of {shape.batch_size} rows of {length} tokens needs {num_blocks} KV "
                f"blocks of {self._block_size} tokens, and there are {self._num_blocks}: lower "
                "--batch-size, --sequence-length or --decode-length"
            )

    async def run(self, shape: Shape) -> Run:
        """Runs one batch and clears the shards. Raises GenerationError and BenchmarkError."""
        self.check(shape)
        # All blocks at once: growing block tables is the scheduler's work.
        allocator = BlockAllocator(self._num_blocks, self._block_size)
        entries = [self._entry(shape, allocator) for _ in range(shape.batch_size)]
        try:
            started = time.perf_counter()
            running = {entry.id: entry for entry in entries}
            prompts = dict.fromkeys(running, shape.sequence_length)
            prefill = Plan(
                admitted=entries, entries=running, chunks=prompts, asked=frozenset(running)
            )
            result = await self._shards.step(prefill, entries[0].id)
            prefill_s = time.perf_counter() - started
            steps: list[float] = []
            while result.batch is not None:
                started = time.perf_counter()
                decode = Plan(
                    admitted=[],
                    entries=running,
                    chunks={},
                    asked=frozenset(result.batch.request_ids),
                )
                result = await self._shards.step(decode, result.batch.id)
                steps.append(time.perf_counter() - started)
        finally:
            await self._shards.clear_cache(None)
        if result.errors:
            raise BenchmarkError(f"a row failed: {next(iter(result.errors.values()))}")
        return Run(prefill_s, tuple(steps))

    def _entry(self, shape: Shape, allocator: BlockAllocator) -> Entry:
        asked = GenerateParameters(
            inputs="", ignore_eos_token=True, top_n_tokens=self._choice.top_n_tokens
        )
        request = Request(
            asked=asked,
            input_ids=tuple(self._random.choices(self._ids, k=shape.sequence_length)),
            sampling=self._choice.sampling,
            max_new_tokens=shape.decode_length,
        )
        entry = Entry(self._next_id, request, self._tokenizer)
        entry.block_table = allocator.allocate(shape.sequence_length + shape.decode_length)
        self._next_id += 1
        return entry


async def warm_up(
    shards: ShardedClient, tokenizer: Tokenizer, shapes: Sequence[Shape], choice: Choice
) -> tuple[Bench, ShardInfo]:
    """Warms the shards up for the largest batch. Raises GenerationError and BenchmarkError."""
    await shards.clear_cache(None)
    info = await shards.info()
    longest = max(shape.sequence_length + shape.decode_length for shape in shapes)
    if longest > info.max_model_len:
        raise BenchmarkError(
            f"--sequence-length plus --decode-length is {longest} tokens, but the model takes at "
            f"most {info.max_model_len}: lower one of them"
        )
    warmup = await shards.warmup(
        max_prefill_tokens=max(shape.num_prompt_tokens for shape in shapes),
        max_batch_size=max(shape.batch_size for shape in shapes),
        max_total_tokens=longest,
    )
    bench = Bench(shards, tokenizer, warmup.num_blocks, info.block_size, info.vocab_size, choice)
    for shape in shapes:
        bench.check(shape)
    return bench, info


@dataclass(slots=True)
class Batches:
    """The runs of one shape."""

    shape: Shape
    runs: list[Run] = field(default_factory=list)

    def figures(self) -> dict[str, dict[str, Spread]]:
        """latency_ms and tokens_per_s of each of STEPS that was run. Tokens are those of the
        prompts, or the generated ones, of the whole batch."""
        prefills = [run.prefill_s for run in self.runs]
        decodes = [run.decode_s for run in self.runs if run.decode_s]
        rates = [len(steps) * self.shape.batch_size / sum(steps) for steps in decodes]
        seconds = {
            "prefill": prefills,
            "decode_token": [step for steps in decodes for step in steps],
            "decode_total": [sum(steps) for steps in decodes],
        }
        prompt_rates = [self.shape.num_prompt_tokens / prefill for prefill in prefills]
        return {
            step: spreads(
                {
                    "latency_ms": (1000 * one for one in found),
                    "tokens_per_s": prompt_rates if step == "prefill" else rates,
                }
            )
            for step, found in seconds.items()
            if found
        }

    def line(self) -> str:
        """The medians."""
        text = f"batch size {self.shape.batch_size}, sequence length {self.shape.sequence_length}"
        for step, unit in (("prefill", "ms"), ("decode_token", "ms/step")):
            if found := self.figures().get(step):
                latency, rate = found["latency_ms"].p50, found["tokens_per_s"].p50
                text += f", {step} {latency:,.1f} {unit}, {rate:,.1f} tokens/s"
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        steps = {step: as_dicts(found) for step, found in self.figures().items()}
        return asdict(self.shape) | steps


def markdown(parameters: Mapping[str, Any], measured: Sequence[Batches]) -> str:
    """Three tables: parameters, latencies, throughputs."""
    latencies, rates = [], []
    for step, title in STEPS.items():
        for one in measured:
            if found := one.figures().get(step):
                shape = (one.shape.batch_size, one.shape.sequence_length)
                latencies.append((title, *shape, *found["latency_ms"].cells("ms")))
                if step != "decode_token":
                    cells = found["tokens_per_s"].cells("tokens/s")[:3]
                    rates.append((title.split()[0], *shape, *cells))
    head = ("Step", "Batch Size", "Sequence Length", "Average", "Lowest", "Highest")
    lines = [*table(("Parameter", "Value"), parameters.items()), ""]
    lines += [*table((*head, "p50", "p90", "p99"), latencies), "", *table(head, rates)]
    return "\n".join(lines)
