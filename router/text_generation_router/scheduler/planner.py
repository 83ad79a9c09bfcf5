"""What the next step computes, and in which blocks: decisions only, no waiting.

A step carries every decoding row. Then unfinished prompts and waiting entries get tokens, as far as
the prefill budget, rows and blocks allow, in the order of `Entry.rank`: by priority, then by age.
An admitted entry shares the blocks that those before it have written or write in this step.
"""

import sys
from bisect import bisect_left, insort
from operator import attrgetter

from text_generation_router.scheduler.blocks import EntryBlocks, PendingBlocks
from text_generation_router.scheduler.costs import Budget, ChunkedPrefill, SchedulerLimits
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.step import Plan, StepResult

_ID, _RANK = attrgetter("id"), attrgetter("rank")


class Queue(list[Entry]):
    """Waiting entries, which hold no blocks, by rank: higher priorities first, then the oldest.

    An entry that does not fit holds back the entries behind it. Therefore no entry starves because
    of later ones of its priority; it waits as long as there are entries of higher priority.
    Invariant: ranks ascend.
    """

    def append(self, entry: Entry) -> None:
        """Queues an entry: a new one behind the others of its priority, an admitted one in its old
        place."""
        entry.state = EntryState.QUEUED
        insort(self, entry, key=_RANK)

    def remove(self, entry: Entry) -> None:
        """Removes an entry that ended while it waited."""
        place = bisect_left(self, entry.rank, key=_RANK)
        assert self[place] is entry, "it is not in the queue"
        del self[place]


class Planner:
    """Owns queue, blocks, prefix cache and the running entries.

    Between two steps: `sweep`, `grow`, `plan`; when the step is done, `settle`. A running entry
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
        self.reason = ""
        """Why the last entries were admitted, in the words of the metric."""
        self.is_closed = False
        """Set when newcomers have made a step fail: none is admitted to the next step."""
        self.num_preempted = 0
        """Entries that gave their blocks back, since the start."""

    # ---- Before a step ----

    def sweep(self) -> None:
        """Releases the entries that ended while a step was in flight."""
        for entry in [e for e in self.running.values() if e.state is EntryState.ENDED]:
            self.release(entry)

    def grow(self) -> list[tuple[int, int]]:
        """Gives every decoding entry a slot for the token whose KV the next step writes. Returns
        entry ids and block ids.

        When no block is free the last entry is preempted: the newest of the lowest priority, which
        may be the one that grows. The first entry is never preempted: alone, any entry fits
        (`submit`). So it goes on until it ends, or until one is admitted that ranks before it. A
        preempted entry keeps its tokens. Therefore every request ends, unless entries that rank
        before it keep coming for ever.
        """
        grown_blocks, allocator = [], self.blocks.allocator
        for entry in self.blocks.lacking(self.running.values(), 0):
            # Until there is a block, or it was preempted itself.
            while entry.id in self.running and not allocator.num_free:
                self._preempt_last()
            if entry.id in self.running:
                grown_blocks.append((entry.id, self.blocks.take(entry)))
        return [pair for pair in grown_blocks if pair[0] in self.running]

    def plan(self, grown_blocks: list[tuple[int, int]]) -> Plan | None:
        """Admits entries and makes the step; None when there is nothing to compute.
        `grown_blocks` as just returned."""
        rows = list(self.running.values())
        admitted, chunks = self._admit()
        for entry in admitted:
            self._run(entry)
        if not self.running:
            assert not self.queue, "where no entry runs the first must fit"
            return None
        self._num_steps = 1 if admitted else self._num_steps + 1
        asked = frozenset(
            entry.id
            for entry in self.running.values()
            if entry.num_computed + chunks.get(entry.id, 0) >= entry.num_inputs
        )
        speculate = self._limits.speculate if rows else 0
        if speculate:
            getting = [entry for entry in rows if entry.id in asked]
            taken = self.blocks.take_ahead(getting, 0, speculate)
            assert taken is not None, "they have room for no draft tokens"
            speculate, grown_blocks = taken[0], grown_blocks + taken[1]
        return Plan(admitted, self.running.copy(), chunks, asked, grown_blocks, speculate)

    def is_unchanged(self, plan: Plan) -> bool:
        """Whether the step behind `plan`, which is in flight, decodes the same entries, except for
        those that end in it: no entry joins or leaves, and no waiting entry could join."""
        if not self._limits.runs_ahead or plan.admitted or plan.chunks:
            return False
        for entry in plan.entries.values():
            if entry.state is EntryState.ENDED:
                return False
        return not (self.queue and self._may_admit(plan))

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step behind `plan`, which is in flight; None if it depends on the result of `plan`.

        Entries that end in `plan` unforeseen are in it: see `Plan.without`.
        """
        if not self.is_unchanged(plan):
            return None
        going_on = [e for e in plan.entries.values() if e.num_tokens + 1 < e.max_context]
        # How many tokens each has gained by then, if all draft tokens in `plan` are right.
        num_more = 1 + plan.speculate
        taken = self.blocks.take_ahead(going_on, num_more, self._limits.speculate)
        if not going_on or taken is None:
            return None
        self._num_steps += 1
        speculate, grown_blocks = taken
        asked = frozenset(map(_ID, going_on))
        return Plan([], plan.entries, {}, asked, grown_blocks, speculate, is_ahead=True)

    # ---- The prefill budget ----

    def _budget(self) -> Budget:
        """The budget of the next step."""
        if not self._limits.chunks_prompts:
            return Budget(self._limits.max_batch_prefill_tokens)
        num_running = len(self.running)
        num_decoding = sum(
            entry.num_computed >= entry.num_inputs for entry in self.running.values()
        )
        num_free = self._limits.max_batch_size - num_running
        num_waiting = num_running - num_decoding + min(len(self.queue), num_free)
        return self._chunked.budget(num_decoding, num_waiting)

    def _share(self, joins: bool) -> tuple[list[Entry], dict[int, int]]:
        """Shares the budget among unfinished prompts and, if `joins`, waiting entries. Returns the
        entries that join, and the scheduled tokens of all."""
        unfinished = [e for e in self.running.values() if e.num_computed < e.num_inputs]
        unfinished.reverse()
        admitted: list[Entry] = []
        chunks: dict[int, int] = {}
        if not (unfinished or joins):
            return admitted, chunks
        budget, pending = self._budget(), PendingBlocks()
        while not budget.is_spent:
            first = self.queue[0] if joins and self.queue else None
            if unfinished and (first is None or unfinished[-1].rank < first.rank):
                entry = unfinished.pop()
                start = entry.num_computed
                left = entry.num_inputs - start
                chunk = self._chunk(start, left, budget, not chunks, may_split=True)
                if not chunk:
                    break
            elif first is None:
                break
            else:
                entry, num_running = first, len(self.running) + len(admitted)
                chunk = self._try(entry, budget, not chunks, pending, num_running)
                if not chunk:
                    joins = False
                    continue
                admitted.append(self.queue.pop(0))
            self.blocks.expect(entry, chunk, pending)
            budget.take(entry.num_computed, chunk)
            chunks[entry.id] = chunk
        return admitted, chunks

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

    def _may_admit(self, plan: Plan) -> bool:
        """Whether the first in the queue may find a row and blocks behind `plan`, as far as is
        known while `plan` is in flight."""
        running, most = self.running, 1 + plan.speculate
        if any(entry.num_tokens + most >= entry.max_context for entry in plan.entries.values()):
            return True  # an entry ends and frees its blocks
        if len(running) >= self._limits.max_batch_size:
            return False
        if len(self.queue) < self._min_size():
            return False
        return self.blocks.find(self.queue[0], PendingBlocks(), len(running)) is not None

    def _admit(self) -> tuple[list[Entry], dict[int, int]]:
        """The entries that join the next step, and the scheduled tokens of all prompts."""
        min_size = self._min_size()
        is_closed = self.is_closed and bool(self.running)
        self.is_closed = False
        joins = bool(self.queue) and len(self.queue) >= min_size and not is_closed
        admitted, chunks = self._share(joins)
        if 0 < len(admitted) < min_size:
            for entry in reversed(admitted):
                self.blocks.release(entry)
                self.queue.append(entry)
            admitted, chunks = self._share(joins=False)
        is_early = not self.running or self._may_wait
        self.reason = "backpressure" if is_early else "wait_exceeded"
        if self._limits.chunks_prompts:
            self.reason = "chunking"
        return admitted, chunks

    @property
    def _may_wait(self) -> bool:
        """Whether fewer than `max_waiting_tokens` steps have passed since entries were admitted."""
        return self._num_steps < self._limits.max_waiting_tokens

    def _min_size(self) -> int:
        """How many must join at once. With chunks joining delays no running entry: any number."""
        if self._limits.chunks_prompts or not self.running or not self._may_wait:
            return 0
        return int(min(len(self.running) * self._limits.waiting_served_ratio, sys.maxsize))

    def _try(
        self, entry: Entry, budget: Budget, is_first: bool, pending: PendingBlocks, num_running: int
    ) -> int:
        """Gives the entry a row and blocks, and returns how many of its tokens are computed; 0, and
        nothing changed, if it does not fit."""
        if num_running >= self._limits.max_batch_size:
            return 0
        found = self.blocks.find(entry, pending, num_running)
        if found is None:
            return 0
        num_cached = len(found.block_ids) * self._limits.block_size
        left, may_split = entry.num_tokens - num_cached, self._limits.chunks_prompts
        chunk = self._chunk(num_cached, left, budget, is_first, may_split)
        if not chunk:
            return 0
        self.blocks.assign(entry, found)
        entry.num_inputs = entry.num_tokens
        entry.num_computed = entry.num_cached_tokens = num_cached
        entry.state = EntryState.RUNNING
        return chunk

    # ---- Rows ----

    def _preempt_last(self) -> None:
        """Takes an entry's blocks; it will compute its tokens again, or find them in the cache."""
        assert len(self.running) > 1, "a single entry must always fit"
        last = self.running[next(reversed(self.running))]
        self.release(last)
        self.queue.append(last)
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
                plan.entries[request_id].add(result.token_ids[start : start + num])
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
            self.queue.append(entry)
        self.blocks = EntryBlocks(self._limits)
        return lost
