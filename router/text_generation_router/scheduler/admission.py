"""Which waiting entries are admitted to the next step: decisions only."""

import sys
from collections.abc import Mapping

from text_generation_router.scheduler.budget import PrefillBudget
from text_generation_router.scheduler.chunked_prefill import Budget
from text_generation_router.scheduler.entry import Entry, EntryState
from text_generation_router.scheduler.entry_blocks import EntryBlocks
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.prefix_cache import PendingBlocks
from text_generation_router.scheduler.queue import Queue

Running = dict[int, Entry]


class Admission:
    """Takes entries from the queue and gives them blocks and a part of the prefill budget.

    The longest head of the queue that fits is admitted. It never preempts running entries, at any
    priority. Tokens in the prefix cache cost nothing.
    """

    def __init__(
        self, limits: SchedulerLimits, queue: Queue, blocks: EntryBlocks, budget: PrefillBudget
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._blocks = blocks
        self._budget = budget
        self._num_steps = 0
        self.may_wait = True
        """Whether the last entries were admitted because of their number, not of their wait."""

    def preempting(self, running: Running) -> Entry | None:
        """The first waiting entry, if it ranks before an unfinished prompt and can be admitted."""
        first = self._queue.first()
        last = next(reversed(running.values()), None)
        if first is None or last is None or first.rank > last.rank:
            return None
        if len(running) == self._limits.max_batch_size or self._min_size(running) > 1:
            return None
        behind = (entry for entry in running.values() if entry.rank > first.rank)
        is_behind = any(entry.num_computed < entry.num_inputs for entry in behind)
        return first if is_behind and self._finds_blocks(first, running) else None

    def may_admit(self, plan: Plan, running: Running) -> bool:
        """Whether a waiting entry may find a row and blocks behind `plan`, as far as is known while
        `plan` is in flight."""
        first = self._queue.first()
        if first is None:
            return False
        most = 1 + (plan.advance.speculate if plan.advance is not None else 0)
        if any(entry.num_tokens + most >= entry.max_context for entry in plan.entries.values()):
            return True  # an entry ends and frees its blocks
        if len(running) >= self._limits.max_batch_size:
            return False
        return len(self._queue) >= self._min_size(running) and self._finds_blocks(first, running)

    def admit(self, running: Running, chunks: Mapping[int, int]) -> list[Entry]:
        """The entries that join the next step, which computes `chunks` of the running prompts."""
        min_size = self._min_size(running)
        if not self._queue or len(self._queue) < min_size:
            return []
        pending = self._blocks.pending(running, chunks)
        budget = self._budget.of(running, len(self._queue))
        for entry_id, chunk in chunks.items():
            budget.take(running[entry_id].num_computed, chunk)
        admitted: list[Entry] = []
        while (entry := self._queue.first()) is not None and not budget.is_spent:
            num_running = len(running) + len(admitted)
            if num_running == self._limits.max_batch_size:
                break
            is_first = not admitted and not chunks
            if not self._try(entry, budget, is_first, pending, num_running):
                break
            budget.take(entry.num_computed, entry.chunk_len)
            admitted.append(self._queue.pop())
        if len(admitted) < min_size:
            for entry in reversed(admitted):
                self._blocks.release(entry)
                self._queue.put_back(entry)
            return []
        self.may_wait = not running or self._may_wait
        return admitted

    def note_step(self, is_join: bool) -> None:
        """A step is planned. `is_join`: entries were admitted to it."""
        self._num_steps = 1 if is_join else self._num_steps + 1

    @property
    def _may_wait(self) -> bool:
        """Whether fewer than `max_waiting_tokens` steps have passed since entries were admitted."""
        return self._num_steps < self._limits.max_waiting_tokens

    def _min_size(self, running: Running) -> int:
        """How many must join at once. With chunks joining delays no running entry: any number."""
        if self._limits.chunks_prompts or not running or not self._may_wait:
            return 0
        return int(min(len(running) * self._limits.waiting_served_ratio, sys.maxsize))

    def _finds_blocks(self, entry: Entry, running: Running) -> bool:
        return self._blocks.find(entry, PendingBlocks(), len(running)) is not None

    def _try(
        self, entry: Entry, budget: Budget, is_first: bool, pending: PendingBlocks, num_running: int
    ) -> bool:
        """Gives the entry blocks and a part of the budget; False, and nothing changed, if it does
        not fit."""
        found = self._blocks.find(entry, pending, num_running)
        if found is None:
            return False
        num_cached = len(found[0]) * self._limits.block_size
        left, may_split = entry.num_tokens - num_cached, self._limits.chunks_prompts
        chunk = self._budget.chunk(num_cached, left, budget, is_first, may_split)
        if not chunk:
            return False
        self._blocks.assign(entry, found)
        entry.num_inputs = entry.num_tokens
        entry.num_computed = entry.num_cached_tokens = num_cached
        entry.chunk_len = chunk
        entry.state = EntryState.RUNNING
        self._blocks.expect(entry, chunk, pending)
        return True
