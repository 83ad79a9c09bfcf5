"""The fake of the shards: tokens by script, memory that notices every wrong write and read."""

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from text_generation_router.client.ranks import ShardInfo, WarmupResult
from text_generation_router.errors import GenerationError
from text_generation_router.request import FinishReason, Request
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import CachedBatch, GrammarResult, Plan, StepResult

from router.tests.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, ids_of

INFO = ShardInfo("float32", "cpu", 16, "fake", VOCAB_SIZE, 4096, "0", 0, 1)
WARMUP = WarmupResult(512, 4095, 4096, 0, 0)
LETTERS = ids_of("abcdefghijklmnopqrstuvwxyz")


def letters(prompt: Sequence[int], place: int) -> int:
    """The default script: a letter that depends on prompt and place alone."""
    return LETTERS[(sum(prompt) + 7 * place + place * place) % 26]


def expected_ids(prompt: Sequence[int], num: int) -> list[int]:
    """The tokens of a request under the default script, in any batch."""
    return [letters(prompt, place) for place in range(num)]


def writes(text: str, then: int = EOS_ID) -> Callable[[Sequence[int], int], int]:
    """A script that writes `text`, then `then`."""
    ids = ids_of(text)
    return lambda prompt, place: ids[place] if place < len(ids) else then


def pooled(input_ids: Sequence[int], width: int) -> bytes:
    """The fake vector of a prompt: its number of tokens, the first, the last, and threes."""
    numbers = [len(input_ids), input_ids[0], input_ids[-1], *[3] * (width - 3)]
    return struct.pack(f"<{width}f", *numbers)


def token_scores(input_ids: Sequence[int]) -> tuple[float, float]:
    """A shorter prompt answers rather with yes."""
    return -0.01 * len(input_ids), -1.0


@dataclass(slots=True)
class Row:
    """What a shard knows of a request."""

    request: Request
    ids: list[int]
    table: list[int]
    # Leading tokens whose KV is in the cache, and how many of them other requests computed.
    num_computed: int
    num_cached: int
    # It gets no token before this many of its tokens are computed.
    num_inputs: int
    # One for every token, see `FakeShards.memory`.
    path: list[int]
    # Whether nothing of its prompt was told yet.
    owes_prompt: bool
    is_long: bool
    # By number of tokens: where the state after them is stored.
    stores: dict[int, int]

    @property
    def left(self) -> int:
        """Tokens that are to be computed before it gets another."""
        return len(self.ids) - self.num_computed

    @property
    def is_unfinished(self) -> bool:
        """Whether its prompt is not computed yet."""
        return self.num_computed < self.num_inputs

    @property
    def place(self) -> int:
        """How many tokens it has written."""
        return len(self.ids) - len(self.request.input_ids)


@dataclass
class FakeShards:
    """Implements the contract of `client.shards.ShardedClient` and asserts the router's part of it.

    `memory` maps each slot to a number that identifies one text up to one token: a row that reads
    another number than its own text's has been given a block with other content. No row writes to a
    block that another row reads, except in the step that writes the shared tokens. Rows compute one
    after the other. `draft` makes the drafts: most are right, and wrong ones are written too.
    `hook` runs before each call and may wait or raise. `calls` lists the calls in order, `passes`
    the tokens that each step computed by request; `num_computed` counts the tokens of all prompts.
    With `num_snapshots` rows have states: `snapshots` maps each to the number of its text.
    A script that is a list is written over and over. Log-probabilities: -0.1 × the place of a
    token, -0.25 in a prompt, -0.5 for each of the likeliest ids, which are 0, 1, …
    """

    num_blocks: int = 64
    block_size: int = 4
    max_rows: int = 1000
    script: Callable[[Sequence[int], int], int] | Sequence[int] = letters
    hook: Callable[[str], Awaitable[None]] | None = None
    recompute_at: int | None = None
    num_snapshots: int | None = None
    snapshots: dict[int, int] = field(default_factory=dict)
    step_ns: int = 1000
    token_ns: int = 0
    batches: dict[int, dict[int, Row]] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    passes: list[dict[int, int]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    trace_contexts: list[str] = field(default_factory=list)
    # Turns of the event loop that a call takes.
    turns: int = 1
    # Calls in flight: two while a step was launched ahead, else one.
    num_under_way: int = 0
    num_computed: int = 0
    # By request, the place of the token at which it fails, alone.
    failing: dict[int, int] = field(default_factory=dict)
    # By request, the number of its prompt's tokens after which it alone runs out of memory.
    unfit: dict[int, int] = field(default_factory=dict)
    texts: dict[tuple[object, int], int] = field(default_factory=dict)
    device: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Steps take this long. With `failure` they fail, and the question for health does, too.
    delay_s: float = 0.0
    failure: GenerationError | None = None
    is_stuck: bool = False
    # All that were compiled; each is accepted, and the script is written all the same.
    grammars: list[str] = field(default_factory=list)
    min_tokens: int = 1
    # Numbers of a hidden state.
    width: int = 4
    requests: list[Request] = field(default_factory=list)
    # What it says of itself, and the limits that the last warm-up was given.
    shard_info: ShardInfo = INFO
    capacity: WarmupResult = WARMUP
    limits: dict[str, int | None] = field(default_factory=dict)
    is_closed: bool = False

    @property
    def rows(self) -> list[int]:
        """The ids of all requests that the shards have."""
        return [request_id for rows in self.batches.values() for request_id in rows]

    def token(self, prompt: Sequence[int], place: int) -> int:
        """The token of the script."""
        script = self.script
        return script(prompt, place) if callable(script) else script[place % len(script)]

    @property
    def may_be_gone(self) -> bool:
        """See `client.shards.ShardedClient`."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight."""
        return self.num_under_way > 0

    @asynccontextmanager
    async def _call(
        self, method: str, ids: Sequence[int], is_ahead: bool = False
    ) -> AsyncIterator[None]:
        most = 1 if is_ahead else 0
        assert self.num_under_way <= most, f"{method} while another call is in flight"
        assert not (self.num_under_way and self.calls[-1][0] != "decode"), "ahead of what?"
        self.calls.append((method, tuple(ids)))
        self.num_under_way += 1
        try:
            async with self.device:
                for _ in range(self.turns):
                    await asyncio.sleep(0)
                if method in ("prefill", "decode"):
                    await asyncio.sleep(self.delay_s)
                    if self.failure is not None:
                        raise self.failure
                if self.hook is not None:
                    await self.hook(method)
                yield
        finally:
            self.num_under_way -= 1

    async def step(
        self,
        plan: Plan,
        batch_id: int,
        cached_batch_id: int | None = None,
        trace_context: str = "",
    ) -> StepResult:
        self.trace_contexts.append(trace_context)
        if plan.admitted:
            return await self.prefill(plan, batch_id, cached_batch_id)
        return await self.decode(plan, batch_id)

    async def prefill(self, plan: Plan, batch_id: int, cached_batch_id: int | None) -> StepResult:
        # Copied immediately, as gRPC does: later changes by the router must not matter.
        new = {entry.id: self._row(entry) for entry in plan.admitted}
        parts = {entry.id: plan.chunks[entry.id] for entry in plan.admitted}
        assert all(0 < parts[i] <= row.left for i, row in new.items())
        has_rows = len(plan.admitted) < len(plan.entries)
        if has_rows:
            self._grow(plan, self.batches[cached_batch_id])
        async with self._call("prefill", list(new)):
            assert new and (cached_batch_id is None) == (not self.batches), "rows left out"
            assert has_rows == (cached_batch_id is not None)
            self.plans.append(plan)
            batch_id = batch_id if cached_batch_id is None else cached_batch_id
            rows = self.batches.setdefault(batch_id, {})
            # The earlier rows come first: they may write blocks that the new ones share.
            old = self._apply(plan, rows) if has_rows else {}
            rows |= new
            return self._step(batch_id, old | parts, plan.speculate)

    async def decode(self, plan: Plan, batch_id: int) -> StepResult:
        async with self._call("decode", [batch_id], plan.is_ahead):
            self.plans.append(plan)
            rows = self.batches.get(batch_id, {}) if plan.is_ahead else self.batches[batch_id]
            self._grow(plan, rows)
            if plan.is_ahead and not rows:
                return StepResult([], [], [], [], None)
            return self._step(batch_id, self._apply(plan, rows), plan.speculate)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        async with self._call("filter", request_ids):
            rows = self.batches[batch_id]
            assert 0 < len(request_ids) < len(rows), "nothing to filter"
            self.batches[batch_id] = {request_id: rows[request_id] for request_id in request_ids}
            return CachedBatch(batch_id, tuple(request_ids))

    async def clear_cache(self, batch_id: int | None) -> None:
        async with self._call("clear", [] if batch_id is None else [batch_id]):
            if batch_id is None:
                self.batches.clear()
            else:
                self.batches.pop(batch_id, None)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        self.grammars.append(grammar)
        return GrammarResult(min_tokens=self.min_tokens)

    async def info(self) -> ShardInfo:
        async with self._call("info", ()):
            return self.shard_info

    async def warmup(self, **limits: int | None) -> WarmupResult:
        self.limits = limits
        async with self._call("warmup", ()):
            return self.capacity

    async def close(self) -> None:
        """Unlike gRPC's, it fails no call in flight: the watch ends them."""
        self.is_closed = True

    async def health(self) -> None:
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        if self.hook is not None:
            await self.hook("health")

    def _row(self, entry: Entry) -> Row:
        ids, prompt = list(entry.input_ids), entry.request.input_ids
        again = [self.token(prompt, place) for place in range(len(ids) - len(prompt))]
        assert ids == [*prompt, *again], "a preempted request came back with other ids"
        num_cached = entry.num_cached_tokens
        assert num_cached % self.block_size == 0 and 0 <= num_cached < len(ids)
        assert not (num_cached and entry.needs_all_computed)
        table = list(entry.block_table)
        assert len(set(table)) == len(table) and set(table) <= set(range(self.num_blocks))
        assert len(ids) < len(table) * self.block_size, "no room for the next token"
        is_new = not entry.token_ids
        is_long = self.recompute_at is not None and len(ids) > self.recompute_at
        self.requests.append(entry.request)
        row = Row(
            request=entry.request,
            ids=ids,
            table=table,
            num_computed=num_cached,
            num_cached=num_cached,
            num_inputs=len(ids),
            path=[],
            owes_prompt=is_new,
            is_long=is_long,
            stores=dict(entry.stores),
        )
        self._extend_path(row)
        self._check_state(row, entry.snapshot)
        return row

    def _check_state(self, row: Row, snapshot: int | None) -> None:
        """The row's state begins where its cached tokens end, and is stored at ends of blocks."""
        if self.num_snapshots is None:
            assert snapshot is None and not row.stores
            return
        held = [self.snapshots[snapshot]] if snapshot is not None else []
        assert held == row.path[max(0, row.num_cached - 1) : row.num_cached], "another's state"
        assert all(0 <= place < self.num_snapshots for place in row.stores.values())
        positions = list(row.stores)
        assert positions == sorted(positions) and not any(p % self.block_size for p in positions)
        assert all(row.num_cached < position < len(row.ids) for position in positions)

    def _extend_path(self, row: Row) -> None:
        """Numbers for all its tokens: equal numbers are equal texts of the same kind and salt."""
        for token_id in row.ids[len(row.path) :]:
            before = row.path[-1] if row.path else (row.request.cache_salt, row.is_long)
            row.path.append(self._text(before, token_id))

    def _text(self, before: object, token_id: int) -> int:
        return self.texts.setdefault((before, token_id), len(self.texts))

    def _grow(self, plan: Plan, rows: dict[int, Row]) -> None:
        """What is grown stays so, even if the step fails."""
        for request_id, block_id in plan.grown_blocks:
            if not (plan.is_ahead and request_id not in rows):
                assert block_id not in rows[request_id].table
                rows[request_id].table.append(block_id)

    def _apply(self, plan: Plan, rows: dict[int, Row]) -> dict[int, int]:
        """How many tokens each row computes. All named rows exist."""
        new = {entry.id for entry in plan.admitted}
        chunks = {i: num_tokens for i, num_tokens in plan.chunks.items() if i not in new}
        assert all(chunks.values())
        unfinished = {request_id for request_id, row in rows.items() if row.is_unfinished}
        assert chunks.keys() <= unfinished
        assert all(num <= rows[request_id].left for request_id, num in chunks.items())
        parts = {i: chunks.get(i, 1) for i in rows if i in chunks or i not in unfinished}
        assert parts == {i: count for i, count in plan.counts.items() if i in rows}
        return parts

    def _step(self, batch_id: int, parts: dict[int, int], speculate: int) -> StepResult:
        """One pass: `parts` are the tokens computed by row, in the order they are computed in."""
        rows = self.batches[batch_id]
        assert len(rows) <= self.max_rows and parts
        self.passes.append(parts)
        new = [i for i in parts if rows[i].num_computed == rows[i].num_cached]
        readers: dict[int, list[int]] = {}
        for request_id, row in rows.items():
            for block_id in row.table:
                readers.setdefault(block_id, []).append(request_id)
        columns, read, errors = [], dict[int, Row](), dict[int, str]()
        num_prompt_tokens = 0
        for request_id, part in parts.items():
            row = rows[request_id]
            if row.is_unfinished:
                self.num_computed += part
                num_prompt_tokens += part
            ends = part == row.left
            draft_tokens = self._draft(row, speculate) if ends and request_id not in new else []
            is_anew = not row.is_unfinished and not row.is_long
            if is_anew and row.num_computed == self.recompute_at:
                row.is_long, row.path, row.num_computed = True, [], 0
                self._extend_path(row)
            end = len(row.ids) if ends else row.num_computed + part
            self._write(request_id, row, row.num_computed, end, draft_tokens, rows, readers, new)
            for position, place in row.stores.items():
                if row.num_computed < position <= end:
                    self.snapshots[place] = row.path[position - 1]
            row.num_computed = end
            self._check_memory(row)
            if not ends and end > (limit := self.unfit.get(request_id, sys.maxsize)):
                errors[request_id] = f"Server error: no memory behind {limit} tokens"
            if ends:
                fails = row.place + len(draft_tokens) >= self.failing.get(request_id, sys.maxsize)
                columns.append((request_id, self._choose(row, draft_tokens, fails)))
                if row.owes_prompt:
                    read[request_id], row.owes_prompt = row, False
        for request_id in errors:
            del rows[request_id]
        result = self._answer(batch_id, rows, columns, errors)
        forward_ns = self.step_ns + self.token_ns * num_prompt_tokens
        return replace(self._read(result, read), forward_ns=forward_ns)

    def _read(self, result: StepResult, rows: dict[int, Row]) -> StepResult:
        """The result with what the requests want of their prompts, which are computed now."""
        prompts = {i: row.request for i, row in rows.items()}
        scored = {i: request for i, request in prompts.items() if request.prefill_logprobs}
        places = {i: len(request.input_ids) - 1 for i, request in scored.items()}
        return replace(
            result,
            prefill_logprobs={i: [float("nan"), *[-0.25] * num] for i, num in places.items()},
            prefill_ranks={i: [*range(1, num + 2)] for i, num in places.items()},
            prefill_top_tokens={
                i: ([*range(top)] * places[i], [-0.5] * top * places[i])
                for i, request in scored.items()
                if (top := request.asked.top_n_tokens)
            },
            pooled_prompts={
                i: pooled(request.input_ids, self.width)
                for i, request in prompts.items()
                if request.asked.pooling is not None
            },
            token_scores={
                i: token_scores(request.input_ids)
                for i, request in prompts.items()
                if request.asked.score_token_ids
            },
        )

    def _draft(self, row: Row, speculate: int) -> list[int]:
        """The drafts after the next token; wrong at some positions."""
        longest = len(row.request.input_ids) + row.request.max_new_tokens
        needed = min(len(row.ids) + speculate, longest)
        assert needed <= len(row.table) * self.block_size, "no room for a token"
        most = -(-longest // self.block_size)
        assert len(row.table) <= most, "more blocks than it can ever need"
        num = min(speculate, longest - len(row.ids) - 1)
        places = range(row.place, row.place + num)
        prompt = row.request.input_ids
        return [self.token(prompt, p) if (p + sum(prompt)) % 4 else BOS_ID for p in places]

    def _write(
        self,
        request_id: int,
        row: Row,
        start: int,
        end: int,
        draft_tokens: list[int],
        rows: dict[int, Row],
        readers: dict[int, list[int]],
        new: list[int],
    ) -> None:
        texts = row.path[start:end]
        for draft in draft_tokens:
            texts.append(self._text(texts[-1], draft))
        for position, text in enumerate(texts, start):
            place, offset = divmod(position, self.block_size)
            block_id = row.table[place]
            for other_id in readers[block_id]:
                other = rows[other_id]
                shares = other_id in new and position < other.num_cached
                is_same = shares and other.path[position] == text
                assert other_id == request_id or is_same, "a block is not its"
            self.memory[block_id * self.block_size + offset] = text

    def _check_memory(self, row: Row) -> None:
        for position in range(row.num_computed):
            place, offset = divmod(position, self.block_size)
            held = self.memory[row.table[place] * self.block_size + offset]
            assert held == row.path[position], "something else is written here"

    def _choose(self, row: Row, draft_tokens: list[int], fails: bool) -> list[int]:
        """The tokens of the script, one more than the right drafts, up to the end of the text.

        For a row that fails they have no meaning: all drafts count as right.
        """
        chosen: list[int] = []
        for draft in [*draft_tokens, None]:
            chosen.append(self.token(row.request.input_ids, row.place))
            row.ids.append(chosen[-1])
            if self._reason(row) is not None or (draft != chosen[-1] and not fails):
                break
        row.num_computed = len(row.ids) - 1
        self._extend_path(row)
        return chosen

    def _reason(self, row: Row) -> FinishReason | None:
        asked = row.request.asked
        if row.ids[-1] == EOS_ID and not asked.ignore_eos_token:
            return FinishReason.EOS_TOKEN
        if row.ids[-1] in asked.stop_token_ids:
            return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if row.place >= row.request.max_new_tokens else None

    def _answer(
        self,
        batch_id: int,
        rows: dict[int, Row],
        columns: list[tuple[int, list[int]]],
        errors: dict[int, str],
    ) -> StepResult:
        """Ended rows are gone; `errors` belong to rows that get no token."""
        reasons, logprobs, top_counts = [], [], []
        for request_id, chosen in columns:
            row = rows[request_id]
            first = row.place - len(chosen)
            reasons.append(self._reason(row))
            logprobs += [-0.1 * (first + n + 1) for n in range(len(chosen))]
            top_counts += [row.request.asked.top_n_tokens or 0] * len(chosen)
            if row.place > (place := self.failing.get(request_id, sys.maxsize)):
                errors[request_id] = f"Server error: token {place}"
            if reasons[-1] is not None or request_id in errors:
                del rows[request_id]
        counts = [len(chosen) for _, chosen in columns]
        top_ids = [n for count in top_counts for n in range(count)]
        if not rows:
            del self.batches[batch_id]
        return StepResult(
            [request_id for request_id, _ in columns],
            [token_id for _, chosen in columns for token_id in chosen],
            logprobs,
            reasons,
            CachedBatch(batch_id, tuple(rows)) if rows else None,
            counts if any(count > 1 for count in counts) else (),
            top_counts if any(top_counts) else (),
            top_ids,
            [-0.5] * len(top_ids),
            errors=errors,
            decode_ns=100,
        )
