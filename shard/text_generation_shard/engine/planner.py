"""What a step computes of the rows: who decodes, which parts of inputs, what is guessed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.engine.forward_batch import (
    SampledPositions,
    decode_tokens,
    prefill_tokens,
    together,
    verified_tokens,
)
from text_generation_shard.engine.ngram import Guesser
from text_generation_shard.engine.plan import Fixed, Plan
from text_generation_shard.engine.step import NewRequest, StepInput
from text_generation_shard.engine.warmup import Costs
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.masks import ConstrainedRow, GrammarMasks


class Running(NamedTuple):
    """What a step computes of the requests that run."""

    # Rows that decode, and the guesses behind them.
    decoding: ScheduledTokens | None
    # Row → [start, end) of its input.
    inputs: dict[int, tuple[int, int]]


class Planner:
    """Owns how far each row's guesses are trusted. Reads the row table; changes nothing of it but
    the tables that grow and the guesses behind what is known."""

    def __init__(
        self,
        fixed: Fixed,
        guesser: Guesser,
        masks: GrammarMasks,
        max_prefill_tokens: int,
        costs: Costs,
    ) -> None:
        """At most `max_prefill_tokens` of inputs are computed in one pass."""
        self.costs = costs
        """Of steps, as rank 0 measured them."""
        self._fixed, self._table = fixed, fixed.table
        self._guesser, self._masks = guesser, masks
        self._max_prefill_tokens = max_prefill_tokens
        self._recompute_at = fixed.model.recompute_at

    def may_run_behind(self, step: StepInput) -> bool:
        """Whether a step can be decided without the tokens of the previous one, and its inputs are
        likely those that the device chooses by itself."""
        return not (step.speculate or self._table.driven) and self._recompute_at is None

    def running(self, step: StepInput, before: SampledPositions | None) -> Running:
        """Of the requests that run; BatchError if what is asked for is not possible. before: what
        the step that is under way samples."""
        table = self._table
        for request_id, block in step.grown:
            if not (step.is_ahead and table.row(request_id) is None):
                table.grow(request_id, block)
        inputs = self._chunks(step)
        rows = table.running if step.runs_on else table.running[:0]
        is_resting = table.is_unfinished(rows)
        if before is not None:
            # Those that end by length in the step that is under way.
            is_resting |= table.lens[rows] + 1 >= table.longest[rows]
        if any(is_resting.tolist()):
            rows = rows[~is_resting]
        if not len(rows):
            return Running(None, inputs)
        num_guessed = None
        if step.speculate:
            num_tokens = len(rows) + sum(end - start for start, end in inputs.values())
            num_guessed = self._guess(rows, step.speculate, num_tokens)
        starts = table.lens[rows]
        if num_guessed is None:
            return Running(decode_tokens(rows, starts), inputs)
        return Running(verified_tokens(rows, starts, num_guessed), inputs)

    def _chunks(self, step: StepInput) -> dict[int, tuple[int, int]]:
        """Row → [start, end) of the inputs that go on."""
        table, inputs = self._table, dict[int, tuple[int, int]]()
        for request_id, count in step.chunks:
            row = table.row(request_id)
            if row is None:
                raise BatchError(f"request {request_id} is not running")
            start, whole = int(table.lens[row]), int(table.input_lens[row])
            if count < 1 or start + count > whole or row in inputs:
                raise BatchError(
                    f"request {request_id}: {count} more tokens can not be computed of an input of "
                    f"{whole} tokens, {start} of which are"
                )
            inputs[row] = (start, start + count)
        return inputs

    def _guess(self, rows: Ints, longest: int, num_tokens: int) -> Ints | None:
        """How many tokens are guessed of each row, None: of none; they stand behind those it knows.
        The step has `num_tokens` without them."""
        table, costs, limit = self._table, self.costs, self._recompute_at
        # A guess must give as many tokens for its time as the step does without it.
        price = len(rows) * costs.token_ns / (costs.single_ns + num_tokens * costs.token_ns)

        def limits_of(asked: Ints) -> Ints:
            lens = table.lens[asked]
            # Blocks, and tokens the request may still get: one comes without a guess.
            room = np.minimum(table.covered(asked) - lens, table.longest[asked] - lens - 1)
            if limit is not None:
                # A row is computed anew between two steps.
                room = np.where(lens < limit, np.minimum(room, limit - lens), room)
            limits: Ints = np.clip(room - 1, 0, longest)
            return limits

        return self._guesser.guess(table, rows, limits_of, price)

    def forget_guesses(self) -> None:
        """Trust the guesses of all rows as if none had been made."""
        self._guesser.forget_all()

    def learn(self, samples: SampledPositions, right: Ints) -> None:
        """Of each row's guesses the first `right` [R] were right."""
        self._guesser.learn(samples.owners, samples.ends - samples.firsts - 1, right)

    def plan(
        self,
        running: Running,
        requests: Sequence[NewRequest],
        rows: Sequence[int],
        before: SampledPositions | None,
    ) -> Plan:
        """All of a step, in one pass unless the inputs are too long for it; requests that are new
        in it have these rows."""
        table, (decoding, inputs) = self._table, running
        for row, request in zip(rows, requests, strict=True):
            self._guesser.forget(row)
            inputs[row] = (request.num_cached_tokens, request.first_end)
        if decoding is None and not inputs:
            raise BatchError("there is nothing to compute: every request rests")
        passes = list(prefill_tokens(inputs, self._max_prefill_tokens, table))
        if decoding is not None:
            passes = [*passes[:-1], together(decoding, passes[-1]) if passes else decoding]
        for scheduled in passes:
            table.check_covered(scheduled.rows, scheduled.ends)
        plan = Plan(self._fixed, passes, self._recomputed(decoding), rows, before)
        if before is None:
            self.start_grammars(plan)
        return plan

    def part(self, scheduled: ScheduledTokens) -> Plan:
        """A part of a step that was planned, by itself; no other is under way."""
        plan = Plan(self._fixed, [scheduled], [], [], None)
        self.start_grammars(plan)
        return plan

    def _recomputed(self, decoding: ScheduledTokens | None) -> list[ScheduledTokens]:
        """Longrope: a row that outgrows the original context gets all its KV with the long factors,
        as transformers' Phi-3 does, so that a row's state depends on its tokens alone."""
        limit = self._recompute_at
        if limit is None or decoding is None:
            return []
        rows = decoding.rows[self._table.lens[decoding.rows] == limit].tolist()
        spans = dict.fromkeys(rows, (0, limit))
        return list(prefill_tokens(spans, self._max_prefill_tokens, self._table, samples=False))

    def start_grammars(self, plan: Plan) -> None:
        """Begin with what the device is not needed for. The tokens of the step before are in the
        table, and the guesses of this one."""
        table, samples, constrained = self._table, plan.samples, list[ConstrainedRow]()
        if not (table.constraints and self._fixed.follows_grammars):
            return
        columns = samples.owners.tolist(), samples.firsts.tolist(), samples.ends.tolist()
        for row, first, end in zip(*columns, strict=True):
            if (constraint := table.constraints.get(row)) is not None:
                known = int(samples.positions[first])
                guesses = table.token_ids[row, known : known + end - first - 1].tolist()
                constrained.append(ConstrainedRow(constraint, first, guesses))
        plan.grammars = self._masks.start(constrained)
