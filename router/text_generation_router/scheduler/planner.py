"""Who computes what in the next step, and in which blocks: decisions only, no waiting.

A step carries every row that decodes, as much of the unfinished prompts as its budget of prompt
tokens allows, oldest first, and then those who wait, as far as budget, rows and blocks go. Whoever
is let in therefore comes after all prompts that are under way are through with this step, and can
share whatever they have written or write in it.
"""

import sys
from collections.abc import Hashable, Iterable

from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.chunked_prefill import Budget, ChunkedPrefill
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.prefix_cache import Chain, PendingBlocks, PrefixCache
from text_generation_router.scheduler.queue import Queue
from text_generation_router.scheduler.shards import Advance, StepResult


class Planner:
    """Owns queue, blocks, prefix cache and the running entries; changes nobody else's things.

    Between two steps: `sweep`, `advance`, `plan`; when the step is done, `settle`. Every entry that
    runs and gets no token in a step either has a part of its prompt computed, or waits behind older
    entries that have.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        """Raises ValueError, for the user, if not even one block can be used."""
        num_blocks = min(limits.num_blocks, limits.max_batch_total_tokens // limits.block_size)
        if num_blocks < 1:
            raise ValueError(
                f"`--max-batch-total-tokens` must be >= {limits.block_size}, one KV block. "
                f"Given: {limits.max_batch_total_tokens}"
            )
        self._limits = limits
        self.allocator = BlockAllocator(num_blocks, limits.block_size, limits.shares_prefixes)
        self.cache = PrefixCache(self.allocator)
        self.queue = Queue()
        # Entries that hold blocks, oldest first. Those that ended stay until `sweep`.
        self.running: dict[int, Entry] = {}
        self._chunked = ChunkedPrefill(
            limits.max_batch_prefill_tokens, limits.block_size, limits.costs, limits.target_ns
        )
        self._steps_since_join = 0
        self.is_closed = False
        """Set when newcomers have made a step fail: the next one goes without any."""
        self.num_preempted = 0
        """Entries that gave their blocks back, since the start."""
        self.is_patient = True
        """Whether those let in last came in because there were many of them."""

    # ---- Before a step ----

    def sweep(self) -> None:
        """Releases the entries that ended while a step was under way."""
        for entry in [e for e in self.running.values() if e.state is EntryState.ENDED]:
            self.release(entry)

    def advance(self) -> Advance:
        """How the running entries go on, with blocks for what they write; preempts if it must."""
        grown_blocks = self._grow()
        chunks = self._share_budget()
        speculate = self._limits.speculate
        if speculate:
            resting = _resting(self.running.values(), chunks)
            getting = [entry for entry in self.running.values() if entry.id not in resting]
            speculate = self._num_guesses(getting, 0)
            grown_blocks += self._take_missing(getting, speculate)
        return Advance(grown_blocks, tuple(chunks.items()), speculate)

    def plan(self, advance: Advance | None) -> Plan | None:
        """Lets others in and makes the step; None when there is nothing to compute.

        `advance` as just returned, or None if the shards have no rows any more.
        """
        running = self.running.copy()
        chunks = {} if advance is None else dict(advance.chunks)
        admitted = [] if running and self.is_closed else self._admit(chunks)
        self.is_closed = False
        if not running and not admitted:
            assert not self.queue, "where nobody runs the first must fit"
            return None
        self._steps_since_join = 1 if admitted else self._steps_since_join + 1
        chunks |= {entry.id: entry.chunk_len for entry in admitted}
        entries = running | {entry.id: entry for entry in admitted}
        asked = frozenset(entries.keys() - _resting(entries.values(), chunks))
        return Plan(admitted, advance if running else None, entries, chunks, asked)

    def is_steady(self, plan: Plan) -> bool:
        """Whether the step behind `plan`, which is under way, will be a decode of the same entries
        less those that end in it: no request joins or leaves, and none that waits could."""
        return self._limits.runs_ahead and not (
            plan.admitted
            or plan.chunks
            or any(entry.state is EntryState.ENDED for entry in plan.entries.values())
            or self._may_admit(plan)
        )

    def _may_admit(self, plan: Plan) -> bool:
        """Whether somebody who waits may find a row and blocks behind `plan`, as far as we know
        while that is under way."""
        first = self.queue.first()
        if first is None:
            return False
        most = 1 + (plan.advance.speculate if plan.advance is not None else 0)
        if any(entry.num_tokens + most >= entry.max_context for entry in plan.entries.values()):
            return True  # what it holds is free by then
        if len(self.running) >= self._limits.max_batch_size or len(self.queue) < self._min_size():
            return False
        return self._find_blocks(first, PendingBlocks()) is not None

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step behind `plan`, while that is under way; None if it depends on its answer.

        Who ends in `plan` without our knowing beforehand is in it: see `Plan.without`.
        """
        if not self.is_steady(plan):
            return None
        assert plan.advance is not None, "without newcomers there is somebody who goes on"
        going_on = [e for e in plan.entries.values() if e.num_tokens + 1 < e.max_context]
        # So many tokens more has each by then, if all that is guessed in `plan` is right.
        num_more = 1 + plan.advance.speculate
        if not going_on or self._num_missing(going_on, num_more) > self.allocator.num_free:
            return None
        self._steps_since_join += 1
        speculate = self._num_guesses(going_on, num_more)
        grown_blocks = self._take_missing(going_on, num_more + speculate)
        advance = Advance(grown_blocks, speculate=speculate, is_ahead=True)
        return Plan([], advance, plan.entries, {}, plan.asked)

    def _grow(self) -> list[tuple[int, int]]:
        """Gives every decoding entry room for the token whose KV the next step writes.

        When no block is left the newest entry is preempted, which may be the one that asks. The
        oldest is never: alone, any entry fits (`submit`).
        """
        grown_blocks = []
        for entry in list(self.running.values()):
            # Or it was preempted, for an older one or for itself.
            while entry.id in self.running and not self._has_slots(entry, entry.num_tokens):
                if self.allocator.num_free:
                    grown_blocks.append((entry.id, self._take_block(entry)))
                else:
                    self._preempt_newest()
        return [pair for pair in grown_blocks if pair[0] in self.running]

    def _has_slots(self, entry: Entry, num_tokens: int) -> bool:
        assert entry.block_table is not None
        return entry.block_table.num_slots >= num_tokens

    def _num_guesses(self, entries: list[Entry], num_more: int) -> int:
        """How many tokens there are blocks to guess of each, behind so many it may have by then."""
        speculate = self._limits.speculate
        while speculate and (
            self._num_missing(entries, num_more + speculate) > self.allocator.num_free
        ):
            speculate //= 2
        return speculate

    def _missing(self, entry: Entry, num_more: int) -> int:
        """How many blocks it lacks to write its tokens and so many more, up to its end."""
        assert entry.block_table is not None
        num_tokens = min(entry.num_tokens + num_more, entry.max_context)
        num_blocks = self.allocator.num_blocks_for(num_tokens)
        return max(0, num_blocks - len(entry.block_table.block_ids))

    def _num_missing(self, entries: Iterable[Entry], num_more: int) -> int:
        return sum(self._missing(entry, num_more) for entry in entries)

    def _take_missing(self, entries: Iterable[Entry], num_more: int) -> list[tuple[int, int]]:
        return [
            (entry.id, self._take_block(entry))
            for entry in entries
            for _ in range(self._missing(entry, num_more))
        ]

    def _take_block(self, entry: Entry) -> int:
        assert entry.block_table is not None
        block_id = self.allocator.grow(entry.block_table)
        assert block_id is not None, "ask num_free first"
        return block_id

    def _preempt_newest(self) -> None:
        """Takes an entry's blocks; it will compute its tokens again, or find them in the cache."""
        assert len(self.running) > 1, "a single entry must always fit"
        newest = self.running[next(reversed(self.running))]
        self.release(newest)
        self.queue.put_back(newest)
        self.num_preempted += 1

    # ---- The budget of prompt tokens ----

    def _share_budget(self) -> dict[int, int]:
        """Parts of the unfinished prompts, oldest first, by entry."""
        chunks: dict[int, int] = {}
        budget = None
        for entry in self.running.values():
            if entry.num_computed >= entry.num_inputs:
                continue
            budget = budget or self._budget()
            start, is_first = entry.num_computed, not chunks
            room = budget.room(start, is_first)
            chunk = self._chunk(start, entry.num_inputs - start, room, is_first, may_split=True)
            if not chunk:
                break
            chunks[entry.id] = chunk
            budget.take(start, chunk)
        return chunks

    def _budget(self) -> Budget:
        if not self._limits.chunks_prompts:
            return Budget(self._limits.max_batch_prefill_tokens)
        running = self.running.values()
        num_decoding = sum(entry.num_computed >= entry.num_inputs for entry in running)
        num_free = self._limits.max_batch_size - len(running)
        num_waiting = len(running) - num_decoding + min(len(self.queue), num_free)
        return self._chunked.budget(num_decoding, num_waiting)

    def _chunk(self, start: int, left: int, budget: int, is_first: bool, may_split: bool) -> int:
        """How many of `left` tokens from `start` on fit the budget; up to a block's end if not all.

        The first of a step always gets something, so that nobody waits for ever.
        """
        if left <= budget:
            return left
        if not (may_split or is_first):
            return 0
        block_size = self._limits.block_size
        whole = (start + budget) // block_size * block_size - start
        return whole if whole > 0 else (budget if is_first else 0)

    # ---- Who is let in ----

    def _admit(self, chunks: dict[int, int]) -> list[Entry]:
        """The longest head of the queue that fits, with blocks for its tokens and the next.

        A block is kept free for every entry that then runs but the newest, so that a newcomer is
        not preempted by the next few steps. What is in the cache costs no computing.
        """
        min_size = self._min_size()
        if not self.queue or len(self.queue) < min_size:
            return []
        pending = self._pending(chunks)
        num_running, num_chunks = len(self.running), len(chunks)
        budget = self._budget()
        for entry_id, chunk in chunks.items():
            budget.take(self.running[entry_id].num_computed, chunk)
        admitted: list[Entry] = []
        while (entry := self.queue.first()) is not None and not budget.is_spent:
            if len(self.running) == self._limits.max_batch_size:
                break
            is_first = not admitted and not num_chunks
            if not self._try_admit(entry, budget, is_first, pending):
                break
            budget.take(entry.num_computed, entry.chunk_len)
            admitted.append(self.queue.pop())
        if len(admitted) < min_size:
            for entry in reversed(admitted):
                self.release(entry)
                self.queue.put_back(entry)
            return []
        self.is_patient = not num_running or self._is_patient
        return admitted

    @property
    def _is_patient(self) -> bool:
        return self._steps_since_join < self._limits.max_waiting_tokens

    def _min_size(self) -> int:
        """How many must come at once; with chunks nobody is held up, so nobody needs to wait."""
        if self._limits.chunks_prompts or not self.running or not self._is_patient:
            return 0
        return int(min(len(self.running) * self._limits.waiting_served_ratio, sys.maxsize))

    def _try_admit(
        self, entry: Entry, budget: Budget, is_first: bool, pending: PendingBlocks
    ) -> bool:
        """Gives the entry blocks and a part of the budget; False, and nothing done, if it can not
        have them."""
        found = self._find_blocks(entry, pending)
        if found is None:
            return False
        shared, chain = found
        allocator, num_cached = self.allocator, len(shared) * self._limits.block_size
        left, room = entry.num_tokens - num_cached, budget.room(num_cached, is_first)
        chunk = self._chunk(num_cached, left, room, is_first, self._limits.chunks_prompts)
        if not chunk:
            return False
        entry.block_table = allocator.allocate(entry.num_tokens + 1, shared)
        entry.chain = chain
        entry.num_inputs = entry.num_tokens
        entry.num_computed = entry.num_cached_tokens = num_cached
        entry.chunk_len = chunk
        entry.state = EntryState.RUNNING
        self.running[entry.id] = entry
        self._expect(entry, num_cached + chunk, pending)
        return True

    def _find_blocks(
        self, entry: Entry, pending: PendingBlocks
    ) -> tuple[list[int], Chain | None] | None:
        """The blocks an entry that waits would share; None: there are too few for the rest."""
        allocator, salt = self.allocator, self._salt(entry)
        shared: list[int] = []
        chain = None if salt is None else Chain(salt)
        if salt is not None and not entry.needs_all_computed:
            # The last token is computed in any case: its output is the next token.
            blocks = entry.full_blocks(0, entry.num_tokens - 1, self._limits.block_size)
            shared, chain = self.cache.match(salt, blocks, pending)
        num_new = allocator.num_blocks_for(entry.num_tokens + 1) - len(shared)
        if allocator.num_free - allocator.num_idle(shared) - num_new < len(self.running):
            return None
        return shared, chain

    def _salt(self, entry: Entry) -> Hashable:
        """What its KV depends on beyond its tokens; None: it shares with nobody. For models that
        stretch long contexts, lengths are a part of it."""
        limits, num_prompt = self._limits, len(entry.request.input_ids)
        limit, is_long = limits.recompute_at, False
        if limit is not None:
            is_long = entry.num_tokens > limit
            if not is_long and entry.max_context > limit:
                return None  # its blocks are written anew on the way
        scale = num_prompt if num_prompt > (limits.prompt_scaled_at or num_prompt) else 0
        if limits.shares_prefixes:
            return (entry.request.cache_salt, is_long, scale)
        return None if entry.group is None else (entry.group, is_long, scale)

    def _pending(self, chunks: dict[int, int]) -> PendingBlocks:
        pending = PendingBlocks()
        for entry_id, chunk in chunks.items():
            entry = self.running[entry_id]
            self._expect(entry, entry.num_computed + chunk, pending)
        return pending

    def _expect(self, entry: Entry, num_tokens: int, pending: PendingBlocks) -> None:
        if entry.chain is not None:
            self.cache.expect(entry.chain, *self._unknown(entry, entry.chain, num_tokens), pending)

    # ---- After a step ----

    def settle(self, plan: Plan, result: StepResult) -> None:
        """Takes account of a step that is done: tokens, what is computed, who ended."""
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
                self._publish(entry)
        for request_id in result.ended:
            self.release(plan.entries[request_id])
        duration_ns = result.forward_ns + result.decode_ns
        num_tokens = sum(plan.chunks.values())
        self._chunked.note(duration_ns, plan.num_decoding, num_tokens, num_in_front)

    def _publish(self, entry: Entry) -> None:
        """Lets others find what is computed of an entry's text."""
        chain = entry.chain
        if chain is None or entry.num_computed // self._limits.block_size <= chain.num_blocks:
            return
        self.cache.publish(chain, *self._unknown(entry, chain, entry.num_computed))

    def _unknown(
        self, entry: Entry, chain: Chain, num_tokens: int
    ) -> tuple[Iterable[tuple[int, ...]], list[int]]:
        """The full blocks behind its chain: their tokens and their numbers."""
        assert entry.block_table is not None
        blocks = entry.full_blocks(chain.num_blocks, num_tokens, self._limits.block_size)
        return blocks, entry.block_table.block_ids[chain.num_blocks :]

    def release(self, entry: Entry) -> None:
        """Takes an entry's blocks back; no step that is under way may write to them."""
        del self.running[entry.id]
        assert entry.block_table is not None
        self.allocator.release(entry.block_table)
        entry.block_table = entry.chain = None

    def integrity(self) -> None:
        """Asserts, between any two steps, that no block and no entry is lost."""
        self.queue.integrity()
        self.cache.integrity()
        tables = [entry.block_table for entry in self.running.values()]
        self.allocator.integrity([table for table in tables if table is not None])
        assert None not in tables and list(self.running) == sorted(self.running)
        assert len(self.running) <= self._limits.max_batch_size
        for entry in self.running.values():
            assert (
                entry.num_computed < entry.num_tokens and not entry.num_tokens > entry.max_context
            )
            if entry.num_computed >= entry.num_inputs:
                assert entry.num_computed == entry.num_tokens - 1


def _resting(entries: Iterable[Entry], chunks: dict[int, int]) -> set[int]:
    """Those who will lack a part of their input after this step, and so get no token."""
    return {
        entry.id
        for entry in entries
        if entry.num_computed < entry.num_inputs
        and entry.num_computed + chunks.get(entry.id, 0) < entry.num_inputs
    }
