"""The plan of one step, and the limits of all steps."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from text_generation_router.scheduler.costs import StepCosts
from text_generation_router.scheduler.entry import Entry


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of the scheduler, in tokens where nothing else is said."""

    num_blocks: int
    block_size: int
    # Rows.
    max_batch_size: int
    # Prompt tokens in one step.
    max_batch_prefill_tokens: int
    # In KV blocks at once; no effect when the blocks hold less.
    max_batch_total_tokens: int
    # Without chunks, entries join a running batch when this many times its size are waiting …
    waiting_served_ratio: float
    # … or when this number of steps has passed since entries joined.
    max_waiting_tokens: int
    # A row that grows beyond this length rewrites all its blocks; None: no row does.
    recompute_at: int | None = None
    # The KV of a longer prompt depends on its length; None: it never does.
    prompt_scaled_at: int | None = None
    # Snapshots of the states that the model keeps per row; None: it keeps none.
    num_snapshots: int | None = None
    # Requests share the blocks of equal beginnings.
    shares_prefixes: bool = True
    # A prompt is computed in several steps if it would delay decoding rows.
    chunks_prompts: bool = True
    # Draft tokens per request and step at most.
    speculate: int = 0
    # A step may be launched before the previous step is done, if it does not depend on its result.
    runs_ahead: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    # From one token of a request to the next; None: as `ChunkedPrefill` decides.
    target_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what the shards compute, for which entries."""

    # New rows; empty: it is a Decode.
    admitted: list[Entry]
    # All running entries; those that are not new have rows on the shards.
    entries: dict[int, Entry]
    # Scheduled prompt tokens by entry; other unfinished prompts get none.
    chunks: dict[int, int]
    # Entries that get a token.
    asked: frozenset[int]
    # (entry id, new last block of its table), applied before the step.
    grown_blocks: Sequence[tuple[int, int]] = ()
    # Most draft tokens of each row that gets a token; the block tables have room for them.
    speculate: int = 0
    # The step before is not answered yet: rows that end in it are skipped, and without other rows
    # the answer is empty.
    is_ahead: bool = False

    @property
    def counts(self) -> dict[int, int]:
        """How many tokens each entry computes, in this order: one of each that decodes, then the
        prompts, which may share the blocks of those before them."""
        asked, chunks = self.asked, self.chunks
        return {i: 1 for i in self.entries if i in asked and i not in chunks} | chunks

    @property
    def num_decoding(self) -> int:
        """Entries that decode; the other ones in `asked` complete their prompts."""
        return len(self.asked - self.chunks.keys())

    def without(self, entry_ids: Set[int]) -> "Plan":
        """The rest of a plan made ahead, without entries that ended in the step before."""
        entries = {i: entry for i, entry in self.entries.items() if i not in entry_ids}
        return replace(self, entries=entries, asked=self.asked - entry_ids)
