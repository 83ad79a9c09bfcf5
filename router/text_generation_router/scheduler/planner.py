"""What the next step computes, and in which blocks: decisions only, no waiting.

A step carries every decoding row, then as many tokens of the unfinished prompts as the prefill
budget allows (`budget.py`), then waiting entries as far as budget, rows and blocks allow
(`admission.py`). Each of the three is in the order of `Entry.rank`: by priority, then by age. An
admitted entry comes after all running prompts in this step, and shares the blocks that they have
written or write in it.
"""

from dataclasses import replace

from text_generation_router.scheduler.admission import Admission
from text_generation_router.scheduler.budget import PrefillBudget, unfinished
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.entry_blocks import EntryBlocks
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.queue import Queue
from text_generation_router.scheduler.shards import Advance, StepResult


class Planner:
    """Owns queue, blocks, prefix cache and the running entries.

    Between two steps: `sweep`, `advance`, `plan`; when the step is done, `settle`. A running entry
    that gets no token in a step either has a part of its prompt computed, or waits for entries that
    rank before it and have, or join.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        """Raises ValueError, for the user, if there is not a single block."""
        self._limits = limits
        self.queue = Queue()
        # Entries that hold blocks, by rank. Those that ended stay until `sweep`.
        self.running: dict[int, Entry] = {}
        self.blocks = EntryBlocks(limits)
        self._budget = PrefillBudget(limits)
        self.admission = Admission(limits, self.queue, self.blocks, self._budget)
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
        self._preempting = None if self.is_closed else self.admission.preempting(self.running)
        chunks = self._budget.share(self.running, len(self.queue), self._preempting)
        speculate = self._limits.speculate
        if self._preempting is not None:
            speculate = 0  # leaves the blocks to it
        if speculate:
            resting = unfinished(self.running.values(), chunks)
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
        admitted = [] if running and self.is_closed else self.admission.admit(running, chunks)
        self.is_closed = False
        for entry in admitted:
            self._run(entry)
        if running and advance is not None and self._preempting is not None and not admitted:
            # The urgent entry has left, or does not fit any more.
            chunks = self._budget.share(running, len(self.queue), None)
            advance = replace(advance, chunks=tuple(chunks.items()))
        if not running and not admitted:
            assert not self.queue, "where no entry runs the first must fit"
            return None
        self.admission.note_step(bool(admitted))
        chunks |= {entry.id: entry.chunk_len for entry in admitted}
        entries = running | {entry.id: entry for entry in admitted}
        asked = frozenset(entries.keys() - unfinished(entries.values(), chunks))
        return Plan(admitted, advance if running else None, entries, chunks, asked)

    def is_unchanged(self, plan: Plan) -> bool:
        """Whether the step behind `plan`, which is in flight, decodes the same entries, except for
        those that end in it: no entry joins or leaves, and no waiting entry could join."""
        return self._limits.runs_ahead and not (
            plan.admitted
            or plan.chunks
            or any(entry.state is EntryState.ENDED for entry in plan.entries.values())
            or self.admission.may_admit(plan, self.running)
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
        self.admission.note_step(is_join=False)
        speculate = self._num_draft_tokens(going_on, num_more)
        grown_blocks = self.blocks.take_missing(going_on, num_more + speculate)
        advance = Advance(grown_blocks, speculate=speculate, is_ahead=True)
        return Plan([], advance, plan.entries, {}, plan.asked)

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
        self._budget.note(plan, result, num_in_front)

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
