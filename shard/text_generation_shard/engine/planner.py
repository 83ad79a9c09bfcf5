"""Plans a step: which rows decode, which parts of inputs are computed, which tokens are drafted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from text_generation_proto import pb

from text_generation_shard.arrays import Flags, Ints
from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.engine.ngram import Drafter
from text_generation_shard.engine.plan import Plan, SampledPositions
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.masks import ConstrainedRow, GrammarMasks
from text_generation_shard.models.registry import LanguageModel


class Costs(NamedTuple):
    """The times of steps, in nanoseconds."""

    # A step of one row, and one of a full batch.
    single_ns: int
    full_ns: int
    # What each prompt token adds, and what it adds for every 1024 preceding tokens.
    token_ns: int
    context_ns: int


class Planner:
    """From the columns of a Step to passes over rows. Of the row table it changes only draft
    tokens."""

    def __init__(
        self,
        model: LanguageModel,
        table: RowTable,
        drafter: Drafter,
        masks: GrammarMasks | None,
        max_prefill_tokens: int,
    ) -> None:
        """masks: None on ranks that do not follow grammars. max_prefill_tokens: the most input
        tokens of one pass."""
        self.costs = Costs(1, 1, 1, 0)
        """The times of steps, as measured by rank 0."""
        self._model, self._table = model, table
        self._drafter, self._masks = drafter, masks
        self._max_prefill_tokens = max_prefill_tokens
        self._recompute_at = model.recompute_at

    def plan(self, step: pb.Step, new_rows: Sequence[int], before: SampledPositions | None) -> Plan:
        """The whole step, in one pass unless its inputs are too long; BatchError if it is invalid.
        new_rows: of its new requests; before: the sampled positions of the step in flight."""
        table = self._table
        for row in new_rows:
            self._drafter.forget(row)
        rows = table.rows_of(list(step.request_ids), step.is_ahead)
        if not len(rows):
            raise BatchError("there is nothing to compute: every request rests")
        starts = table.lens[rows]
        passes: list[ScheduledTokens] = []
        is_input = starts < table.input_lens[rows]
        num_inputs = 0
        if step.counts or is_input.any():
            counts = self._counts(step, rows, starts, is_input)
            own, rows = rows[is_input], rows[~is_input]
            num_inputs = int(counts[is_input].sum())
            passes = self._prefill(own, starts[is_input], counts[is_input])
            starts = starts[~is_input]
        recomputed: list[ScheduledTokens] = []
        if len(rows):
            decoding = self._decode(rows, starts, step.speculate, num_inputs)
            if self._recompute_at is not None:
                recomputed = self._recomputed(decoding, self._recompute_at)
            passes = [*passes[:-1], together(decoding, passes[-1]) if passes else decoding]
        for own, ends in ((scheduled.rows, scheduled.ends) for scheduled in passes):
            uncovered = ends > table.covered(own)
            if uncovered.any():
                ids = table.ids(own[uncovered].tolist())
                raise BatchError(f"requests {ids} have no block for their next token")
        if self._model.state_bytes:
            passes = [item._replace(states=table.states(item)) for item in passes]
        plan = Plan(table, passes, recomputed, new_rows, before)
        if before is None:
            self.start_grammars(plan)
        return plan

    def _counts(self, step: pb.Step, rows: Ints, starts: Ints, is_input: Flags) -> Ints:
        """How many tokens each row computes; is_input: rows whose input is incomplete."""
        given = step.counts or [1] * len(step.request_ids)
        if len(given) != len(step.request_ids):
            raise BatchError(f"{len(given)} counts were given for {len(step.request_ids)} requests")
        of_request = dict(zip(step.request_ids, given, strict=True))
        counts: Ints = np.array([of_request[item] for item in self._table.ids(rows.tolist())])
        most = np.where(is_input, self._table.input_lens[rows] - starts, 1)
        for index in np.flatnonzero((counts < 1) | (counts > most)).tolist():
            [request_id], row = self._table.ids([rows[index]]), rows[index]
            raise BatchError(
                f"request {request_id}: {counts[index]} more tokens can not be computed of an "
                f"input of {self._table.input_lens[row]} tokens, {starts[index]} of which are"
            )
        return counts

    def _decode(self, rows: Ints, starts: Ints, speculate: int, num_inputs: int) -> ScheduledTokens:
        """The tokens of the rows that decode, with their draft tokens, beside input tokens."""
        # A state can not be taken back behind wrong draft tokens.
        if speculate and not self._model.state_bytes:
            num_drafted = self._draft(rows, speculate, len(rows) + num_inputs)
            if num_drafted is not None:
                return verified_tokens(rows, starts, num_drafted)
        ones = np.ones_like(rows)
        return ScheduledTokens(rows, starts, ones, ones, starts + 1, is_decode=True)

    def _prefill(
        self, rows: Ints, starts: Ints, counts: Ints, samples: bool = True
    ) -> list[ScheduledTokens]:
        """Input tokens, cut into passes of at most `max_prefill_tokens`. A row samples at the end
        of its input, if `samples`."""
        passes, piece = list[ScheduledTokens](), list[tuple[int, int, int]]()
        room = self._max_prefill_tokens
        for row, start, left in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            while left:
                count = min(room, left)
                piece.append((row, start, count))
                start, left, room = start + count, left - count, room - count
                if not room:
                    passes.append(self._scheduled(piece, samples))
                    piece, room = [], self._max_prefill_tokens
        return [*passes, self._scheduled(piece, samples)] if piece else passes

    def _scheduled(self, piece: list[tuple[int, int, int]], samples: bool) -> ScheduledTokens:
        rows, starts, counts = np.array(piece, dtype=np.int64).T.copy()
        ends: Ints = starts + counts
        is_complete = (ends == self._table.input_lens[rows]) & samples
        return ScheduledTokens(rows, starts, counts, is_complete.astype(np.int64), ends)

    def _draft(self, rows: Ints, longest: int, num_tokens: int) -> Ints | None:
        """Write draft tokens behind the known tokens of rows; the number per row, or None for no
        draft token. The step has `num_tokens` without them."""
        table, costs, limit = self._table, self.costs, self._recompute_at
        # A draft token must yield as many tokens per time as the step without it.
        price = len(rows) * costs.token_ns / (costs.single_ns + num_tokens * costs.token_ns)

        lens = table.lens[rows]
        # Limited by blocks and by max_new_tokens, of which one comes without a draft token.
        room = np.minimum(table.covered(rows) - lens, table.longest[rows] - lens - 1)
        if limit is not None:
            # A row can be recomputed only between two steps.
            room = np.where(lens < limit, np.minimum(room, limit - lens), room)
        return self._drafter.draft(table, rows, np.clip(room - 1, 0, longest), price)

    def _recomputed(self, decoding: ScheduledTokens, limit: int) -> list[ScheduledTokens]:
        """Longrope: a row that outgrows the original context has all its KV recomputed with the
        long factors, as in transformers' Phi-3, so that its state depends on its tokens alone."""
        rows = decoding.rows[self._table.lens[decoding.rows] == limit]
        return self._prefill(rows, np.zeros_like(rows), np.full_like(rows, limit), samples=False)

    def start_grammars(self, plan: Plan) -> None:
        """Start the grammars' work on the CPU. The table holds the tokens of the previous step and
        the draft tokens of this one."""
        table, samples, constrained = self._table, plan.samples, list[ConstrainedRow]()
        if not table.constraints or self._masks is None:
            return
        columns = samples.owners.tolist(), samples.firsts.tolist(), samples.ends.tolist()
        for row, first, end in zip(*columns, strict=True):
            if (constraint := table.constraints.get(row)) is not None:
                known = int(samples.positions[first])
                draft_tokens = table.token_ids[row, known : known + end - first - 1].tolist()
                constrained.append(ConstrainedRow(constraint, first, draft_tokens))
        plan.grammars = self._masks.start(constrained)


def verified_tokens(rows: Ints, starts: Ints, num_drafted: Ints) -> ScheduledTokens:
    """One token of each row and its draft tokens; each token samples."""
    counts = num_drafted + 1
    return ScheduledTokens(rows, starts, counts, counts, starts + counts)


def together(first: ScheduledTokens, second: ScheduledTokens) -> ScheduledTokens:
    """Both passes as one."""
    columns = zip(first[:5], second[:5], strict=True)
    rows, starts, counts, num_sampled, ends = (np.concatenate(pair) for pair in columns)
    return ScheduledTokens(rows, starts, counts, num_sampled, ends)
