"""A batcher on shards that are played: tokens by script, memory that notices every wrong write."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from text_generation_router.errors import GenerationError, RouterError
from text_generation_router.metrics import Metrics
from text_generation_router.request import (
    FinishReason,
    GeneratedText,
    PrefillOutput,
    Request,
    SamplingParams,
    StoppingCriteria,
    TokenOutput,
)
from text_generation_router.scheduler.batcher import Batcher, SchedulerLimits
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import CachedBatch, StepResult
from text_generation_router.tokenizer import Tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_IDS = {
    byte: ALPHABET.index(pre_tokenizers.ByteLevel(False).pre_tokenize_str(chr(byte))[0][0])
    for byte in range(128)
}
EOS_ID, PAD_ID = 256, 257


def make_tokenizer() -> Tokenizer:
    """One token per byte, and the special tokens `</s>` and `<pad>`."""
    fast = FastTokenizer(models.BPE({character: i for i, character in enumerate(ALPHABET)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["</s>", "<pad>"])
    return Tokenizer(fast, {}, num_workers=1)


def ids_of(text: str) -> tuple[int, ...]:
    """The ids of an ASCII text."""
    return tuple(BYTE_IDS[byte] for byte in text.encode("ascii"))


def make_request(
    prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 5, *stop: str, **options: object
) -> Request:
    """A greedy request; `options` are fields of Request."""
    stopping = StoppingCriteria(max_new_tokens, stop_sequences=stop)
    return replace(Request(tuple(prompt), SamplingParams(), stopping), **options)


def letters(prompt: Sequence[int], place: int) -> int:
    """The default script: a letter that depends on prompt and place alone."""
    return BYTE_IDS[ord("a") + (sum(prompt) + 7 * place + place * place) % 26]


def expected_ids(prompt: Sequence[int], num: int) -> list[int]:
    """What a request writes under the default script, whoever else runs."""
    return [letters(prompt, place) for place in range(num)]


def writes(text: str, then: int = EOS_ID) -> Callable[[Sequence[int], int], int]:
    """A script that writes `text`, then `then`."""
    ids = ids_of(text)
    return lambda prompt, place: ids[place] if place < len(ids) else then


@dataclass(slots=True)
class Row:
    """What a shard knows of a request."""

    request: Request
    ids: list[int]
    table: list[int]
    num_cached: int = 0


@dataclass
class FakeShards:
    """Keeps the contract of `Shards` and asserts that the router keeps its part.

    `memory` maps each slot to (request, position): a step that finds another's token under its own
    positions has caught the router giving a block to two; only the cached positions may be another
    request's, if that has the same prompt, and nobody writes to a block that another row reads.
    `hook` runs before each call and may wait or raise; `calls` lists what was asked, in order;
    `num_computed` counts the tokens of all prefills.
    """

    num_blocks: int = 64
    block_size: int = 4
    max_rows: int = 1000
    script: Callable[[Sequence[int], int], int] = letters
    hook: Callable[[str], Awaitable[None]] | None = None
    batches: dict[int, dict[int, Row]] = field(default_factory=dict)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    is_busy: bool = False
    num_computed: int = 0
    # A request id and the place of the token it fails at, alone.
    failing: tuple[int, int] | None = None
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @asynccontextmanager
    async def _call(self, method: str, ids: Sequence[int]) -> AsyncIterator[None]:
        assert not self.is_busy, f"{method} while another call is under way"
        self.calls.append((method, tuple(ids)))
        self.is_busy = True
        try:
            await asyncio.sleep(0)
            if self.hook is not None:
                await self.hook(method)
            yield
        finally:
            self.is_busy = False

    async def prefill(
        self, batch_id: int, entries: Sequence[Entry], cached_batch_id: int | None
    ) -> StepResult:
        # Read at once, as gRPC does: what the router changes later must not matter.
        new = {
            e.id: Row(
                e.request, list(e.input_ids), list(e.block_table.block_ids), e.num_cached_tokens
            )
            for e in entries
        }
        asked = {e.id for e in entries if e.wants_prefill_logprobs}
        async with self._call("prefill", list(new)):
            assert (cached_batch_id is None) == (not self.batches), "rows left out"
            if cached_batch_id is None:
                self.batches[batch_id] = {}
            else:
                batch_id = cached_batch_id
            for request_id, row in new.items():
                prompt = row.request.input_ids
                again = [self.script(prompt, i) for i in range(len(row.ids) - len(prompt))]
                assert row.ids == [*prompt, *again], "a preempted request came back with other ids"
                assert row.num_cached % self.block_size == 0 and row.num_cached < len(prompt)
                assert not (row.num_cached and request_id in asked)
                self.prompts[request_id] = prompt
                self.batches[batch_id][request_id] = row
                for position in range(row.num_cached, len(row.ids)):
                    self._write(request_id, row, position)
                self.num_computed += len(row.ids) - row.num_cached
                self._check_memory(request_id, row)
            result = self._step(batch_id, new, self.batches[batch_id])
            logprobs = {
                i: [float("nan")] + [-0.5] * (len(new[i].request.input_ids) - 1) for i in asked
            }
            return replace(result, prefill_logprobs=logprobs)

    async def decode(
        self, batch_ids: Sequence[int], grown_blocks: Sequence[tuple[int, int]]
    ) -> StepResult:
        async with self._call("decode", list(batch_ids)):
            [batch_id] = batch_ids
            rows = self.batches[batch_id]
            for request_id, block_id in grown_blocks:
                rows[request_id].table.append(block_id)
            for request_id, row in rows.items():
                self._write(request_id, row, len(row.ids) - 1)
            return self._step(batch_id, rows, rows)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        async with self._call("filter", request_ids):
            rows = self.batches[batch_id]
            assert 0 < len(request_ids) < len(rows), "nothing to filter"
            self.batches[batch_id] = {request_id: rows[request_id] for request_id in request_ids}
            return CachedBatch(batch_id, tuple(request_ids))

    async def clear_cache(self, batch_id: int | None) -> None:
        async with self._call("clear", [] if batch_id is None else [batch_id]):
            self.batches.pop(batch_id, None)

    async def health(self) -> None:
        if self.hook is not None:
            await self.hook("health")

    def _write(self, request_id: int, row: Row, position: int) -> None:
        assert position < len(row.table) * self.block_size, "no room for a token"
        block_id = row.table[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        for others in self.batches.values():
            for other_id, other in others.items():
                assert other_id == request_id or block_id not in other.table, "a block is not its"
        slot = block_id * self.block_size + position % self.block_size
        self.memory[slot] = (request_id, position)

    def _check_memory(self, request_id: int, row: Row) -> None:
        for position in range(len(row.ids)):
            slot = row.table[position // self.block_size] * self.block_size
            slot += position % self.block_size
            writer, written = self.memory[slot]
            assert written == position, "somebody else wrote here"
            if writer != request_id:
                assert position < row.num_cached, "somebody else wrote here"
                assert self.prompts[writer] == row.request.input_ids, "another prompt"

    def _step(self, batch_id: int, rows: dict[int, Row], all_rows: dict[int, Row]) -> StepResult:
        """Chooses a token for each of `rows`; those that end leave `all_rows`."""
        assert len(all_rows) <= self.max_rows
        columns: list[tuple[int, int, float, FinishReason | None, int]] = []
        errors: dict[int, str] = {}
        for request_id, row in list(rows.items()):
            self._check_memory(request_id, row)
            place = len(row.ids) - len(row.request.input_ids)
            token_id = self.script(row.request.input_ids, place)
            row.ids.append(token_id)
            reason = None
            if place + 1 >= row.request.stopping.max_new_tokens:
                reason = FinishReason.LENGTH
            elif token_id == EOS_ID and not row.request.stopping.ignore_eos_token:
                reason = FinishReason.EOS_TOKEN
            num_top = row.request.top_n_tokens
            columns.append((request_id, token_id, -0.25 * (place + 1), reason, num_top))
            if (request_id, place) == self.failing:
                errors[request_id] = f"Server error: token {place}"
            if reason is not None or request_id in errors:
                del all_rows[request_id]
        ids, token_ids, logprobs, reasons, counts = zip(*columns, strict=True)
        top_ids = [n for count in counts for n in range(count)]
        if not all_rows:
            del self.batches[batch_id]
        return StepResult(
            ids,
            token_ids,
            logprobs,
            reasons,
            CachedBatch(batch_id, tuple(all_rows)) if all_rows else None,
            counts if any(counts) else (),
            top_ids,
            [-1.0] * len(top_ids),
            errors=errors,
            forward_ns=1000,
            decode_ns=100,
        )


@dataclass(frozen=True)
class Outcome:
    """All that a client was given."""

    tokens: list[TokenOutput]
    prefill: PrefillOutput | None
    generated: GeneratedText | None
    error: RouterError | None

    @property
    def text(self) -> str:
        """The streamed text."""
        return "".join(output.token.text for output in self.tokens)

    @property
    def ids(self) -> list[int]:
        """The streamed ids."""
        return [output.token.id for output in self.tokens]


async def collect(entry: Entry) -> Outcome:
    """Reads an entry to its end."""
    tokens: list[TokenOutput] = []
    prefill = None
    while not tokens or tokens[-1].generated is None:
        try:
            outputs = await asyncio.wait_for(entry.next_outputs(), 10)
        except RouterError as error:
            return Outcome(tokens, prefill, None, error)
        for output in outputs:
            if isinstance(output, PrefillOutput):
                assert prefill is None and not tokens
                prefill = output
            else:
                tokens.append(output)
    return Outcome(tokens, prefill, tokens[-1].generated, None)


@dataclass(frozen=True)
class Rig:
    """A batcher, its shards and its metrics."""

    batcher: Batcher
    shards: FakeShards
    metrics: Metrics

    async def outcome(self, *arguments: object, **options: object) -> Outcome:
        """Submits `make_request(…)` and reads the answer to its end."""
        return await collect(self.batcher.submit(make_request(*arguments, **options)))

    async def turn(self, times: int = 1) -> None:
        """Lets everybody else do something, so many times."""
        for _ in range(times):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that must happen soon."""
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("this never came true")

    async def settle(self) -> None:
        """Waits until nothing runs; asserts that nothing is lost."""
        await self.until(lambda: not self.shards.batches and not self.shards.is_busy)
        await self.turn(20)
        assert not self.shards.batches, "rows are left"
        self.batcher.integrity()
        self.check_empty()

    def check_empty(self) -> None:
        """Asserts that the gauges say so, and that they add up."""
        metrics = self.metrics
        assert metrics.kv_blocks_used.value == metrics.queue_size.value == 0
        assert metrics.batch_current_size.value == metrics.batch_current_max_tokens.value == 0
        total = metrics.kv_blocks_free.value * self.shards.block_size
        assert total == metrics.batch_max_total_tokens.value


def make_rig(shards: FakeShards | None = None, **limits: float) -> Rig:
    """A batcher that does not run yet; `limits` are fields of SchedulerLimits."""
    shards = shards or FakeShards()
    given = {
        "num_blocks": shards.num_blocks,
        "block_size": shards.block_size,
        "max_batch_size": 128,
        "max_batch_prefill_tokens": 4096,
        "max_batch_total_tokens": shards.num_blocks * shards.block_size,
        "waiting_served_ratio": 0.0,
        "max_waiting_tokens": 20,
    }
    metrics = Metrics(100, 200)
    scheduler_limits = SchedulerLimits(**(given | limits))
    return Rig(Batcher(shards, make_tokenizer(), metrics, scheduler_limits), shards, metrics)


@asynccontextmanager
async def running(shards: FakeShards | None = None, **limits: float) -> AsyncIterator[Rig]:
    """Runs a batcher; asserts at the end that it is empty and that it stops."""
    rig = make_rig(shards, **limits)
    task = asyncio.create_task(rig.batcher.run())
    try:
        yield rig
        await rig.settle()
    finally:
        await rig.batcher.close()
        await task
    rig.batcher.integrity()


class Failing:
    """A hook that fails the given calls, by method and count: `Failing(decode=[2])`."""

    def __init__(self, **failures: Sequence[int]) -> None:
        self._failures = failures
        self._counts: dict[str, int] = {}

    async def __call__(self, method: str) -> None:
        count = self._counts[method] = self._counts.get(method, 0) + 1
        if count in self._failures.get(method, ()):
            raise GenerationError(f"Server error: {method} {count}")


class Gate:
    """A hook that holds calls of one method back until it is opened."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._is_open = asyncio.Event()
        self.is_reached = False

    async def __call__(self, method: str) -> None:
        if method == self._method:
            self.is_reached = True
            await self._is_open.wait()

    def open(self) -> None:
        """Lets the call go on, and all others."""
        self._is_open.set()
