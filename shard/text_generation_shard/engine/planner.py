"""What a step computes: which rows decode, which parts of inputs are computed, which tokens are
drafted.

Speculation is by n-grams: a row's last tokens occurred before, and what followed is drafted. A
draft token costs the time of one more token in the step. It is verified by sampling at its position
as if nothing were drafted, so draft tokens change the speed of tokens, never the tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from text_generation_proto import pb

from text_generation_shard.arrays import Flags, Ints
from text_generation_shard.device.base import ScheduledTokens, last_ones
from text_generation_shard.engine.row_table import PromptPart, RowTable
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.masks import ConstrainedRow, GrammarMasks, StepGrammars
from text_generation_shard.models.registry import LanguageModel
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
        running = self._table.running
        return {row for row, request_id in owners if running.get(request_id) != row}

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


class Costs(NamedTuple):
    """The times of steps, in nanoseconds."""

    # A step of one row, and one of a full batch.
    single_ns: int
    full_ns: int
    # What each prompt token adds, and what it adds for every 1024 preceding tokens.
    token_ns: int
    context_ns: int


# Length of the n-gram: longest, shortest, and shortest for a row of a low acceptance rate.
_LONGEST, _SHORTEST, _SHORTEST_AT_LOW_RATE = 4, 2, 3
# The acceptance rate is a moving average of the share of right draft tokens: its first value, the
# value below which it is low, and the weight of the latest verification.
_FIRST_RATE, _LOW_RATE, _WEIGHT = 0.6, 0.5, 0.3
# Keeps the logarithm of acceptance rate finite and not 0.
_LEAST_RATE, _MOST_RATE = 1e-6, 0.99
# Most steps between two searches of a row.
_MOST_MISSED = 4
# Steps without draft tokens after a wrong one, at a low acceptance rate; doubled each time, up to
# the second.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 4, 128
# Steps between the draft tokens of a row whose draft tokens do not pay.
_TRIAL_BACKOFF = 8


class Drafter:
    """Owns the acceptance rate in each row's draft tokens.

    A row gets as many draft tokens as pay for their time on average, and at least one. A row whose
    draft tokens are wrong gets none for longer and longer.
    """

    def __init__(self, capacity: int, agree: Callable[[Ints], Ints]) -> None:
        """`agree` returns rank 0's numbers on all ranks."""
        self._agree = agree
        self._rate = np.full(capacity, _FIRST_RATE)
        # Steps left to rest, the length of the last rest after a wrong draft token, and the number
        # of consecutive searches without a result.
        self._backoff = np.zeros(capacity, dtype=np.int64)
        self._last_backoff = np.zeros(capacity, dtype=np.int64)
        self._misses = np.zeros(capacity, dtype=np.int64)

    def forget(self, rows: int | slice = slice(None)) -> None:
        """Reset a row for a new request, or all rows."""
        self._rate[rows] = _FIRST_RATE
        for waits in (self._backoff, self._last_backoff, self._misses):
            waits[rows] = 0

    def draft(self, table: RowTable, rows: Ints, limits: Ints, price: float) -> Ints | None:
        """Write draft tokens into the table behind the known tokens of each row; the number of each
        [R], at most its limit, or None if there are none. A draft token pays if it is right with a
        probability of at least `price`."""
        backoff = self._backoff[rows]
        awake = np.flatnonzero(backoff == 0)
        self._backoff[rows] = np.maximum(backoff - 1, 0)
        if not len(awake):
            return None
        own = rows[awake]
        rate = np.clip(self._rate[own], _LEAST_RATE, _MOST_RATE)
        # The n-th draft token is right if all before it are: acceptance rate ** n >= price.
        paying = (math.log(min(price, 1.0)) / np.log(rate)).astype(np.int64)
        limits = np.minimum(limits[awake], np.maximum(paying, 1))
        found, draft_tokens = _continuations(table, own, max(1, int(limits.max())))
        needed = np.where(rate < _LOW_RATE, _SHORTEST_AT_LOW_RATE, _SHORTEST)
        has_found = found >= needed
        # Where nothing repeats, searching in every step costs too much.
        self._misses[own] = np.where(has_found, 0, self._misses[own] + 1)
        wanted = np.where(has_found, limits, 0)
        is_trial = (wanted > 0) & (paying == 0)
        self._backoff[own] = np.where(
            has_found, is_trial * _TRIAL_BACKOFF, np.minimum(self._misses[own], _MOST_MISSED)
        )
        if not wanted.any():
            return None
        if table.constraints:
            _cut_forbidden(table, own, wanted, draft_tokens)
            # Only rank 0 knows what a grammar allows.
            wanted = self._agree(wanted)
        row, step = np.nonzero(np.arange(draft_tokens.shape[1]) < wanted[:, None])
        known = table.lens[own] + 1
        table.token_ids[own[row], known[row] + step] = draft_tokens[row, step]
        counts = np.zeros(len(rows), dtype=np.int64)
        counts[awake] = wanted
        return counts if wanted.any() else None

    def learn(self, rows: Ints, drafted: Ints, right: Ints) -> None:
        """Of `drafted` [R] tokens of each row, the first `right` [R] were right."""
        tried = np.flatnonzero(drafted)
        own, tries, hits = rows[tried], drafted[tried], right[tried]
        # Draft tokens behind the first wrong one were not tried.
        share = hits / np.minimum(hits + 1, tries)
        rate = self._rate[own] + _WEIGHT * (share - self._rate[own])
        self._rate[own] = rate
        backoff, last = self._backoff[own], self._last_backoff[own]
        backs_off = (hits == 0) & (rate < _LOW_RATE)
        last = np.where(backs_off, np.clip(2 * last, _FIRST_BACKOFF, _LONGEST_BACKOFF), last)
        self._backoff[own] = np.where(backs_off, np.maximum(backoff, last), backoff)
        self._last_backoff[own] = np.where(hits > 0, 0, last)


def _continuations(table: RowTable, rows: Ints, width: int) -> tuple[Any, Any]:
    """Find the longest n-gram at each row's end that occurred before, and its latest occurrence:
    the length of the n-gram [R], up to _LONGEST, and the tokens that followed [R, width]."""
    known = table.lens[rows] + 1
    longest = int(known.max())
    token_ids = table.token_ids[rows, :longest]
    row = np.arange(len(rows))
    # Length of the match that ends at each position but the last [R, longest].
    is_same = np.arange(longest) < known[:, None] - 1
    found = np.zeros(is_same.shape, dtype=np.int8)
    for count in range(min(_LONGEST, longest)):
        last = token_ids[row, np.maximum(known - 1 - count, 0)]
        is_same[:, :count] = False
        is_same[:, count:] &= token_ids[:, : longest - count] == last[:, None]
        is_same &= (known > count)[:, None]
        found += is_same
    # The last position with the longest match.
    at = longest - 1 - found[:, ::-1].argmax(axis=1)
    # A repetition shorter than the draft tokens is continued periodically.
    period = np.maximum(known - 1 - at, 1)
    after = at[:, None] + 1 + np.arange(width) % period[:, None]
    draft_tokens = token_ids[row[:, None], np.minimum(after, longest - 1)]
    return found[row, at], draft_tokens


def _cut_forbidden(table: RowTable, rows: Ints, counts: Ints, draft_tokens: Any) -> None:
    """Cut each row's draft tokens [R, width] at the first token that its grammar forbids."""
    for index in np.flatnonzero(counts).tolist():
        if (constraint := table.constraints.get(int(rows[index]))) is not None:
            own = draft_tokens[index, : int(counts[index])].tolist()
            counts[index] = len(constraint.allowed(own))


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
        for scheduled in passes:
            uncovered = scheduled.ends > table.covered(scheduled.rows)
            if uncovered.any():
                ids = table.ids(scheduled.rows[uncovered].tolist())
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
