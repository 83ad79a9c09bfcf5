"""One step as it was decided, and the limits of all of them."""

from collections.abc import Set
from dataclasses import dataclass, field, replace

from text_generation_router.scheduler.chunked_prefill import StepCosts
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import Advance


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may fill. Counts are tokens unless they say otherwise."""

    num_blocks: int
    block_size: int
    # Rows.
    max_batch_size: int
    # Of prompts in one step.
    max_batch_prefill_tokens: int
    # Held in KV blocks at once; does nothing when the blocks hold less.
    max_batch_total_tokens: int
    # Without chunks, others join a running batch when this many times its size are waiting …
    waiting_served_ratio: float
    # … or when this number of steps has passed since others joined.
    max_waiting_tokens: int
    # A row that grows beyond this number of tokens writes all its blocks anew; None: no row does.
    recompute_at: int | None = None
    # The KV of a longer prompt depends on its length; None: it never does.
    prompt_scaled_at: int | None = None
    # Texts that begin like one before take its blocks.
    shares_prefixes: bool = True
    # A prompt is computed over several steps if it would hold up those who decode.
    chunks_prompts: bool = True
    # Guessed tokens per request and step at most.
    speculate: int = 0
    # A step may be launched before the previous step is done, if it does not need its tokens.
    runs_ahead: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    # From one token of a request to the next; None: as `ChunkedPrefill` decides.
    target_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what is asked of the shards and whom it concerns."""

    # New rows; none: it is a Decode.
    admitted: list[Entry]
    # How the rows that are there go on; None: there are none.
    advance: Advance | None
    # All that take part, oldest first.
    entries: dict[int, Entry]
    # Prompt tokens by entry.
    chunks: dict[int, int]
    # Those that get a token.
    asked: frozenset[int]

    @property
    def num_decoding(self) -> int:
        """How many were writing before and go on; the others compute their prompts."""
        return len(self.asked - self.chunks.keys())

    def without(self, entry_ids: Set[int]) -> "Plan":
        """What is left of a plan made ahead, now that we know who ended in the step before."""
        entries = {i: entry for i, entry in self.entries.items() if i not in entry_ids}
        return replace(self, entries=entries, asked=self.asked - entry_ids)
