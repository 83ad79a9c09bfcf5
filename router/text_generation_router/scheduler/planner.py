"""What the next step computes, and in which blocks: decisions only, no waiting.

A step carries every decoding row, then as many tokens of the unfinished prompts as the prefill
budget allows, then waiting entries as far as budget, rows and blocks allow. Each of the three is in
the order of `Entry.rank`: by priority, then by age. An admitted entry comes after all running
prompts in this step, and shares the blocks that they have written or write in it.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from text_generation_router.scheduler.chunked_prefill import Budget, ChunkedPrefill
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.entry_blocks import EntryBlocks
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.prefix_cache import PendingBlocks
from text_generation_router.scheduler.queue import Queue
from text_generation_router.scheduler.shards import Advance, StepResult


class Planner:
    """Owns queue, blocks, prefix cache and the running entries.

    Between two steps: `sweep`, `advance`, `plan`; when the step is done, `settle`. A running entry
    that gets no token in a step either has a part of its prompt computed, or waits for entries that
    rank before it and have, or join.

    The longest head of the queue that fits is admitted. That never preempts running entries, at any
    priority. Tokens in the prefix cache cost nothing.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        """Raises ValueError, for the user, if there is not a single block."""
        self._limits = limits
        self.queue = Queue()
        # Entries that hold blocks, by rank. Those that ended stay until `sweep`.
        self.running: dict[int, Entry] = {}
        self.blocks = EntryBlocks(limits)
        self._chunked = ChunkedPrefill(
            limits.max_batch_prefill_tokens, limits.block_size, limits.costs, limits.target_ns
        )
        # Since entries were admitted.
        self._num_steps = 0
        self.may_wait = True
        """Whether the last entries were admitted because of their number, not of their wait."""
        # The waiting entry that joins the next step before prompts of lower rank go on.
        self._preempting: Entry | None = None
        self.is_closed = False
        """Set when newcomers have made a step fail: none is admitted to the next step."""
        self.num_preempted = 0
        """Entries that gave their blocks back, since the start."""

    # ---- Before a step ----

    def sweep(self) -> None:
        """Releases the entries that ended while a step was in flight."""
        for entry in [e for e in self.running.values() if e.state is EntryState.ENDED]:
            self.release(entry)

    def advance(self) -> Advance:
        """How the running entries go on, with blocks for what they write; preempts if it must."""
        grown_blocks = self._grow()
        self._preempting = None if self.is_closed else self._find_preempting()
        chunks = self._share(self.running, self._preempting)
        speculate = self._limits.speculate
        if self._preempting is not None:
            speculate = 0  # leaves the blocks to it
        if speculate:
            resting = _unfinished(self.running.values(), chunks)
            getting = [entry for entry in self.running.values() if entry.id not in resting]
            speculate = self._num_draft_tokens(getting, 0)
            grown_blocks += self.blocks.take_missing(getting, speculate)
        return Advance(grown_blocks, tuple(chunks.items()), speculate)

    def plan(self, advance: Advance | None) -> Plan | None:
        """Admits entries and makes the step; None when there is nothing to compute.

        `advance` as just returned, or None if the shards hold no rows.
        """
        running = self.running.copy()
        chunks = {} if advance is None else dict(advance.chunks)
        admitted = [] if running and self.is_closed else self._admit(running, chunks)
        self.is_closed = False
        for entry in admitted:
            self._run(entry)
        if running and advance is not None and self._preempting is not None and not admitted:
            # The urgent entry has left, or does not fit any more.
            chunks = self._share(running, None)
            advance = replace(advance, chunks=tuple(chunks.items()))
        if not running and not admitted:
            assert not self.queue, "where no entry runs the first must fit"
            return None
        self._num_steps = 1 if admitted else self._num_steps + 1
        chunks |= {entry.id: entry.chunk_len for entry in admitted}
        entries = running | {entry.id: entry for entry in admitted}
        asked = frozenset(entries.keys() - _unfinished(entries.values(), chunks))
        return Plan(admitted, advance if running else None, entries, chunks, asked)

    def is_unchanged(self, plan: Plan) -> bool:
        """Whether the step behind `plan`, which is in flight, decodes the same entries, except for
        those that end in it: no entry joins or leaves, and no waiting entry could join."""
        return self._limits.runs_ahead and not (
            plan.admitted
            or plan.chunks
            or any(entry.state is EntryState.ENDED for entry in plan.entries.values())
            or self._may_admit(plan)
        )

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step behind `plan`, which is in flight; None if it depends on the result of `plan`.

        Entries that end in `plan` unforeseen are in it: see `Plan.without`.
        """
        if not self.is_unchanged(plan):
            return None
        assert plan.advance is not None, "a plan without newcomers has rows"
        going_on = [e for e in plan.entries.values() if e.num_tokens + 1 < e.max_context]
        # How many tokens each has gained by then, if all draft tokens in `plan` are right.
        num_more = 1 + plan.advance.speculate
        if not going_on or not self.blocks.has_room(going_on, num_more):
            return None
        self._num_steps += 1
        speculate = self._num_draft_tokens(going_on, num_more)
        grown_blocks = self.blocks.take_missing(going_on, num_more + speculate)
        advance = Advance(grown_blocks, speculate=speculate, is_ahead=True)
        return Plan([], advance, plan.entries, {}, plan.asked)

    # ---- The prefill budget ----

    def _budget(self, running: Mapping[int, Entry]) -> Budget:
        """The budget of the next step."""
        if not self._limits.chunks_prompts:
            return Budget(self._limits.max_batch_prefill_tokens)
        num_decoding = sum(entry.num_computed >= entry.num_inputs for entry in running.values())
        num_free = self._limits.max_batch_size - len(running)
        num_waiting = len(running) - num_decoding + min(len(self.queue), num_free)
        return self._chunked.budget(num_decoding, num_waiting)

    def _share(self, running: Mapping[int, Entry], preempting: Entry | None) -> dict[int, int]:
        """Scheduled tokens of the unfinished prompts, in order of rank. Prompts that rank behind
        `preempting` get none."""
        chunks: dict[int, int] = {}
        budget = None
        for entry in running.values():
            if entry.num_computed >= entry.num_inputs:
                continue
            if preempting is not None and preempting.rank < entry.rank:
                break
            budget = budget or self._budget(running)
            start = entry.num_computed
            chunk = self._chunk(start, entry.num_inputs - start, budget, not chunks, may_split=True)
            if not chunk:
                break
            chunks[entry.id] = chunk
            budget.take(start, chunk)
        return chunks

    def _chunk(self, start: int, left: int, budget: Budget, is_first: bool, may_split: bool) -> int:
        """How many of `left` tokens from `start` on fit the budget. A part ends at the end of a
        block. The first of a step always gets something: no prompt waits for ever."""
        room = budget.room(start, is_first)
        if left <= room:
            return left
        if not (may_split or is_first):
            return 0
        block_size = self._limits.block_size
        whole = (start + room) // block_size * block_size - start
        return whole if whole > 0 else (room if is_first else 0)

    # ---- Admission ----

    def _find_preempting(self) -> Entry | None:
        """The first waiting entry, if it ranks before an unfinished prompt and can be admitted."""
        running, first = self.running, self.queue.first()
        last = next(reversed(running.values()), None)
        if first is None or last is None or first.rank > last.rank:
            return None
        if len(running) == self._limits.max_batch_size or self._min_size(running) > 1:
            return None
        behind = (entry for entry in running.values() if entry.rank > first.rank)
        is_behind = any(entry.num_computed < entry.num_inputs for entry in behind)
        return first if is_behind and self._finds_blocks(first) else None

    def _may_admit(self, plan: Plan) -> bool:
        """Whether a waiting entry may find a row and blocks behind `plan`, as far as is known while
        `plan` is in flight."""
        running, first = self.running, self.queue.first()
        if first is None:
            return False
        most = 1 + (plan.advance.speculate if plan.advance is not None else 0)
        if any(entry.num_tokens + most >= entry.max_context for entry in plan.entries.values()):
            return True  # an entry ends and frees its blocks
        if len(running) >= self._limits.max_batch_size:
            return False
        return len(self.queue) >= self._min_size(running) and self._finds_blocks(first)

    def _admit(self, running: dict[int, Entry], chunks: Mapping[int, int]) -> list[Entry]:
        """The entries that join the next step, which computes `chunks` of the running prompts."""
        min_size = self._min_size(running)
        if not self.queue or len(self.queue) < min_size:
            return []
        pending = self.blocks.pending(running, chunks)
        budget = self._budget(running)
        for entry_id, chunk in chunks.items():
            budget.take(running[entry_id].num_computed, chunk)
        admitted: list[Entry] = []
        while (entry := self.queue.first()) is not None and not budget.is_spent:
            num_running = len(running) + len(admitted)
            if num_running == self._limits.max_batch_size:
                break
            is_first = not admitted and not chunks
            if not self._try(entry, budget, is_first, pending, num_running):
                break
            budget.take(entry.num_computed, entry.chunk_len)
            admitted.append(self.queue.pop())
        if len(admitted) < min_size:
            for entry in reversed(admitted):
                self.blocks.release(entry)
                self.queue.put_back(entry)
            return []
        self.may_wait = not running or self._may_wait
        return admitted

    @property
    def _may_wait(self) -> bool:
        """Whether fewer than `max_waiting_tokens` steps have passed since entries were admitted."""
        return self._num_steps < self._limits.max_waiting_tokens

    def _min_size(self, running: Mapping[int, Entry]) -> int:
        """How many must join at once. With chunks joining delays no running entry: any number."""
        if self._limits.chunks_prompts or not running or not self._may_wait:
            return 0
        return int(min(len(running) * self._limits.waiting_served_ratio, sys.maxsize))

    def _finds_blocks(self, entry: Entry) -> bool:
        return self.blocks.find(entry, PendingBlocks(), len(self.running)) is not None

    def _try(
        self, entry: Entry, budget: Budget, is_first: bool, pending: PendingBlocks, num_running: int
    ) -> bool:
        """Gives the entry blocks and a part of the budget; False, and nothing changed, if it does
        not fit."""
        found = self.blocks.find(entry, pending, num_running)
        if found is None:
            return False
        num_cached = len(found[0]) * self._limits.block_size
        left, may_split = entry.num_tokens - num_cached, self._limits.chunks_prompts
        chunk = self._chunk(num_cached, left, budget, is_first, may_split)
        if not chunk:
            return False
        self.blocks.assign(entry, found)
        entry.num_inputs = entry.num_tokens
        entry.num_computed = entry.num_cached_tokens = num_cached
        entry.chunk_len = chunk
        entry.state = EntryState.RUNNING
        self.blocks.expect(entry, chunk, pending)
        return True

    # ---- Blocks for what runs ----

    def _grow(self) -> list[tuple[int, int]]:
        """Gives every decoding entry a slot for the token whose KV the next step writes.

        When no block is free the last entry is preempted: the newest of the lowest priority, which
        may be the one that grows. The first entry is never preempted: alone, any entry fits
        (`submit`). So it goes on until it ends, or until one is admitted that ranks before it. A
        preempted entry keeps its tokens. Therefore every request ends, unless entries that rank
        before it keep coming for ever.
        """
        grown_blocks, allocator = [], self.blocks.allocator
        for entry in list(self.running.values()):
            # Until it has room, or was preempted.
            while entry.id in self.running and not _has_slots(entry):
                if allocator.num_free:
                    grown_blocks.append((entry.id, self.blocks.take(entry)))
                else:
                    self._preempt_last()
        return [pair for pair in grown_blocks if pair[0] in self.running]

    def _num_draft_tokens(self, entries: list[Entry], num_more: int) -> int:
        """How many tokens to draft for each: as many as there are blocks for, behind `num_more`."""
        speculate = self._limits.speculate
        while speculate and not self.blocks.has_room(entries, num_more + speculate):
            speculate //= 2
        return speculate

    def _preempt_last(self) -> None:
        """Takes an entry's blocks; it will compute its tokens again, or find them in the cache."""
        assert len(self.running) > 1, "a single entry must always fit"
        last = self.running[next(reversed(self.running))]
        self.release(last)
        self.queue.put_back(last)
        self.num_preempted += 1

    def _run(self, entry: Entry) -> None:
        """Adds an entry to the running ones, in the order of ranks."""
        last = next(reversed(self.running.values()), entry)
        self.running[entry.id] = entry
        if last.rank > entry.rank:
            ordered = sorted(self.running.values(), key=lambda each: each.rank)
            self.running = {each.id: each for each in ordered}

    # ---- After a step ----

    def settle(self, plan: Plan, result: StepResult) -> None:
        """Records a step that is done: tokens, what is computed, which entries ended."""
        num_in_front = 0
        for entry_id, chunk in plan.chunks.items():
            num_in_front += chunk * plan.entries[entry_id].num_computed
            plan.entries[entry_id].num_computed += chunk
        start = 0
        for request_id, num in zip(result.request_ids, result.counts, strict=True):
            if request_id not in result.errors:
                entry = plan.entries[request_id]
                entry.token_ids += result.token_ids[start : start + num]
                entry.num_computed = entry.num_tokens - 1
            start += num
        for entry in plan.entries.values():
            if entry.id not in result.errors:
                self.blocks.publish(entry)
        for request_id in result.ended:
            entry = plan.entries[request_id]
            self.release(entry)
        num_tokens = sum(plan.chunks.values())
        duration_ns = result.forward_ns + result.decode_ns
        self._chunked.note(duration_ns, plan.num_decoding, num_tokens, num_in_front)

    def release(self, entry: Entry) -> None:
        """Takes an entry's blocks back. No step in flight may write to them."""
        del self.running[entry.id]
        self.blocks.release(entry)

    def lose_blocks(self) -> list[Entry]:
        """The contents of all blocks are lost: running entries are queued again, by rank, and the
        prefix cache is empty. No step is in flight. Returns those entries."""
        self.sweep()
        lost = list(self.running.values())
        for entry in reversed(lost):
            self.release(entry)
            self.queue.put_back(entry)
        self.blocks.clear()
        return lost

    def integrity(self) -> None:
        """Asserts, between any two steps, that no block and no entry is lost."""
        self.queue.integrity()
        self.blocks.integrity(self.running.values())
        ranks = [entry.rank for entry in self.running.values()]
        assert ranks == sorted(set(ranks))
        assert len(self.running) <= self._limits.max_batch_size
        for entry in self.running.values():
            assert entry.num_computed < entry.num_tokens <= entry.max_context
            if entry.num_computed >= entry.num_inputs:
                assert entry.num_computed == entry.num_tokens - 1


def _has_slots(entry: Entry) -> bool:
    """Whether its blocks hold all its tokens."""
    assert entry.block_table is not None
    return entry.block_table.num_slots >= entry.num_tokens


def _unfinished(entries: Iterable[Entry], chunks: Mapping[int, int]) -> set[int]:
    """Ids of entries whose prompt is not complete after this step: they get no token."""
    return {
        entry.id
        for entry in entries
        if entry.num_computed < entry.num_inputs
        and entry.num_computed + chunks.get(entry.id, 0) < entry.num_inputs
    }
