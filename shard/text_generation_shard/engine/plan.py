"""A planned step: its passes, and where they sample."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.device.base import ScheduledTokens, last_ones
from text_generation_shard.engine.prompt_outputs import PromptPart
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.grammars.masks import StepGrammars
from text_generation_shard.sampling import Choice


class SampledPositions(NamedTuple):
    """Where a step samples: S positions, grouped by row."""

    # [S] the row, and the position that the sampled token gets.
    rows: Ints
    positions: Ints
    # [R] rows that sample, and the range [first, end) of each among the S.
    owners: Ints
    firsts: Ints
    ends: Ints
    # Each row samples once.
    is_single: bool

    @classmethod
    def once(cls, rows: Ints, positions: Ints) -> "SampledPositions":
        """Of rows that sample once each."""
        index = np.arange(len(rows) + 1)
        return cls(rows, positions, rows, index[:-1], index[1:], True)

    @classmethod
    def of(cls, passes: Sequence[ScheduledTokens]) -> "SampledPositions":
        """Of a step with these passes."""
        if len(passes) == 1 and passes[0].is_decode:
            return cls.once(passes[0].rows, passes[0].ends)
        counts = np.concatenate([item.num_sampled for item in passes])
        is_sampling = counts > 0
        counts = counts[is_sampling]
        owners = np.concatenate([item.rows for item in passes])[is_sampling]
        known = np.concatenate([item.ends for item in passes])[is_sampling]
        ends = counts.cumsum()
        rows, positions = np.repeat(owners, counts), last_ones(known + 1, counts)
        is_single = len(rows) == len(owners)
        return cls(rows, positions, owners, ends - counts, ends, is_single)


class Plan:
    """A step in values. Owns what its passes have found in prompts."""

    def __init__(
        self,
        table: RowTable,
        passes: Sequence[ScheduledTokens],
        recomputed: Sequence[ScheduledTokens] = (),
        new_rows: Sequence[int] = (),
        before: SampledPositions | None = None,
    ) -> None:
        """recomputed: passes that write existing KV again, before all others. before: the sampled
        positions of the step in flight, whose tokens the host does not know yet."""
        self.computed, self.new_rows, self.before = passes, new_rows, before
        self.passes: Sequence[ScheduledTokens] = (*recomputed, *passes)
        self.samples = SampledPositions.of(passes)
        # [R] the requests of the rows that sample.
        self.request_ids = table.ids(self.samples.owners.tolist())
        # Set once the previous step is collected; None: no sampled row has a grammar.
        self.grammars: StepGrammars | None = None
        # In the order of tokens.
        self.prompt_parts: list[PromptPart] = []
        self.was_behind = before is not None
        """Whether the previous step was in flight when this one was launched."""
        self._table = table

    def waiting(self, scheduled: ScheduledTokens) -> Ints:
        """See `ScheduledTokens.waiting`."""
        assert self.before is not None, "the host knows all tokens"
        is_waiting = np.isin(scheduled.rows, self.before.rows)
        # A new request may have the row of a request that ended in the step in flight.
        return np.flatnonzero(is_waiting & ~np.isin(scheduled.rows, self.new_rows))

    def ended_rows(self) -> set[int]:
        """Rows whose requests ended in the previous step; they may have new requests now."""
        owners = zip(self.samples.owners.tolist(), self.request_ids, strict=True)
        return {owner[0] for owner in owners if not self._table.has(*owner)}

    def drop_ended(self, choice: Choice) -> Choice:
        """Remove the rows that ended in the previous step from the choice, `samples` and
        `request_ids`, if this one `was_behind`."""
        ended = self.ended_rows()
        if not ended:
            return choice
        owners = self.samples.owners.tolist()
        kept = [index for index, row in enumerate(owners) if row not in ended]
        left = Choice(choice.token_ids[kept], choice.logprobs[kept], choice.scores[kept])
        # Each row samples once: a step launched behind another has no draft tokens.
        self.samples = SampledPositions.once(self.samples.rows[kept], self.samples.positions[kept])
        self.request_ids = [self.request_ids[index] for index in kept]
        if self.grammars is not None:
            self.grammars.keep(kept)
        return left
