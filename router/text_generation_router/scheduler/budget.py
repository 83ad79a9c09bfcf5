"""How many prompt tokens a step computes, and of which prompts: decisions only."""

from collections.abc import Iterable, Mapping

from text_generation_router.scheduler.chunked_prefill import Budget, ChunkedPrefill
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.plan import Plan, SchedulerLimits
from text_generation_router.scheduler.shards import StepResult


class PrefillBudget:
    """Divides the prefill budget of a step among prompts. Owns the `ChunkedPrefill`, which learns
    how long steps take."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._chunked = ChunkedPrefill(
            limits.max_batch_prefill_tokens, limits.block_size, limits.costs, limits.target_ns
        )

    def of(self, running: Mapping[int, Entry], num_queued: int) -> Budget:
        """The budget of the next step."""
        if not self._limits.chunks_prompts:
            return Budget(self._limits.max_batch_prefill_tokens)
        num_decoding = sum(entry.num_computed >= entry.num_inputs for entry in running.values())
        num_free = self._limits.max_batch_size - len(running)
        num_waiting = len(running) - num_decoding + min(num_queued, num_free)
        return self._chunked.budget(num_decoding, num_waiting)

    def share(
        self, running: Mapping[int, Entry], num_queued: int, preempting: Entry | None
    ) -> dict[int, int]:
        """Scheduled tokens of the unfinished prompts, in order of rank. Prompts that rank behind
        `preempting` get none."""
        chunks: dict[int, int] = {}
        budget = None
        for entry in running.values():
            if entry.num_computed >= entry.num_inputs:
                continue
            if preempting is not None and preempting.rank < entry.rank:
                break
            budget = budget or self.of(running, num_queued)
            start = entry.num_computed
            chunk = self.chunk(start, entry.num_inputs - start, budget, not chunks, may_split=True)
            if not chunk:
                break
            chunks[entry.id] = chunk
            budget.take(start, chunk)
        return chunks

    def chunk(self, start: int, left: int, budget: Budget, is_first: bool, may_split: bool) -> int:
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

    def note(self, plan: Plan, result: StepResult, num_in_front: int) -> None:
        """Learns from a step that is done. `num_in_front`: see `ChunkedPrefill.note`."""
        num_tokens = sum(plan.chunks.values())
        duration_ns = result.forward_ns + result.decode_ns
        self._chunked.note(duration_ns, plan.num_decoding, num_tokens, num_in_front)


def unfinished(entries: Iterable[Entry], chunks: Mapping[int, int]) -> set[int]:
    """Ids of entries whose prompt is not complete after this step: they get no token."""
    return {
        entry.id
        for entry in entries
        if entry.num_computed < entry.num_inputs
        and entry.num_computed + chunks.get(entry.id, 0) < entry.num_inputs
    }
