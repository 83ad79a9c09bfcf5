"""Plans a step: which rows decode, which parts of inputs are computed, which tokens are drafted."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.engine.ngram import Drafter
from text_generation_shard.engine.plan import Plan, SampledPositions
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.step import Costs, StepInput
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.masks import ConstrainedRow, GrammarMasks
from text_generation_shard.models.base import LanguageModel


class Planner:
    """Of the row table it changes only grown block tables and draft tokens."""

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

    def plan(self, step: StepInput, rows: Sequence[int], before: SampledPositions | None) -> Plan:
        """The whole step, in one pass unless its inputs are too long; BatchError if it is invalid.
        rows: of its new requests; before: the sampled positions of the step in flight."""
        table = self._table
        inputs = self._chunks(step)
        decoding = self._decoding(step, inputs, before)
        for row, request in zip(rows, step.new_requests, strict=True):
            self._drafter.forget(row)
            inputs[row] = (request.num_cached_tokens, request.first_end)
        if decoding is None and not inputs:
            raise BatchError("there is nothing to compute: every request rests")
        passes = list(prefill_tokens(inputs, self._max_prefill_tokens, table))
        if decoding is not None:
            passes = [*passes[:-1], together(decoding, passes[-1]) if passes else decoding]
        for scheduled in passes:
            table.check_covered(scheduled.rows, scheduled.ends)
        if self._model.state_bytes:
            passes = [item._replace(states=table.states(item)) for item in passes]
        plan = Plan(table, passes, self._recomputed(decoding), rows, before)
        if before is None:
            self.start_grammars(plan)
        return plan

    def _decoding(
        self,
        step: StepInput,
        inputs: Mapping[int, tuple[int, int]],
        before: SampledPositions | None,
    ) -> ScheduledTokens | None:
        """The tokens of the rows that decode, with their draft tokens, beside these inputs."""
        table = self._table
        # Those of new requests are the last ones.
        rows = table.running[: len(table.running) - len(step.new_requests)]
        if not (step.runs_on and len(rows)):
            return None
        is_resting = table.is_unfinished(rows)
        if before is not None:
            # These end by length in the step in flight.
            is_resting |= table.lens[rows] + 1 >= table.longest[rows]
        if any(is_resting.tolist()):
            rows = rows[~is_resting]
            if not len(rows):
                return None
        num_drafted = None
        # A state can not be taken back behind wrong draft tokens.
        if step.speculate and not self._model.state_bytes:
            num_tokens = len(rows) + sum(end - start for start, end in inputs.values())
            num_drafted = self._draft(rows, step.speculate, num_tokens)
        starts = table.lens[rows]
        if num_drafted is None:
            return decode_tokens(rows, starts)
        return verified_tokens(rows, starts, num_drafted)

    def _chunks(self, step: StepInput) -> dict[int, tuple[int, int]]:
        """Row → [start, end) of the inputs that are continued."""
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

    def _draft(self, rows: Ints, longest: int, num_tokens: int) -> Ints | None:
        """Write draft tokens behind the known tokens of rows; the number per row, or None for no
        draft token. The step has `num_tokens` without them."""
        table, costs, limit = self._table, self.costs, self._recompute_at
        # A draft token must yield as many tokens per time as the step without it.
        price = len(rows) * costs.token_ns / (costs.single_ns + num_tokens * costs.token_ns)

        def limits_of(asked: Ints) -> Ints:
            lens = table.lens[asked]
            # Limited by blocks and by max_new_tokens, of which one comes without a draft token.
            room = np.minimum(table.covered(asked) - lens, table.longest[asked] - lens - 1)
            if limit is not None:
                # A row can be recomputed only between two steps.
                room = np.where(lens < limit, np.minimum(room, limit - lens), room)
            limits: Ints = np.clip(room - 1, 0, longest)
            return limits

        return self._drafter.draft(table, rows, limits_of, price)

    def part(self, scheduled: ScheduledTokens) -> Plan:
        """One part of a planned step; no other step is in flight."""
        plan = Plan(self._table, [scheduled])
        self.start_grammars(plan)
        return plan

    def _recomputed(self, decoding: ScheduledTokens | None) -> list[ScheduledTokens]:
        """Longrope: a row that outgrows the original context has all its KV recomputed with the
        long factors, as in transformers' Phi-3, so that its state depends on its tokens alone."""
        limit = self._recompute_at
        if limit is None or decoding is None:
            return []
        rows = decoding.rows[self._table.lens[decoding.rows] == limit].tolist()
        spans = dict.fromkeys(rows, (0, limit))
        return list(prefill_tokens(spans, self._max_prefill_tokens, self._table, samples=False))

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


def decode_tokens(rows: Ints, starts: Ints) -> ScheduledTokens:
    """One token of each row; each samples."""
    ones = np.ones(len(rows), dtype=np.int64)
    return ScheduledTokens(rows, starts, ones, ones, starts + 1, is_decode=True)


def verified_tokens(rows: Ints, starts: Ints, num_drafted: Ints) -> ScheduledTokens:
    """One token of each row and its draft tokens; each token samples."""
    counts = num_drafted + 1
    return ScheduledTokens(rows, starts, counts, counts, starts + counts)


def prefill_tokens(
    spans: Mapping[int, tuple[int, int]], budget: int, table: RowTable, samples: bool = True
) -> Iterator[ScheduledTokens]:
    """Cut row → [start, end) into passes of at most `budget` tokens. A row samples at the end of
    its input."""
    piece: list[tuple[int, int, int]] = []
    room = budget
    for row, (start, end) in spans.items():
        while start < end:
            count = min(room, end - start)
            piece.append((row, start, count))
            start += count
            room -= count
            if room == 0:
                yield _scheduled(piece, table, samples)
                piece, room = [], budget
    if piece:
        yield _scheduled(piece, table, samples)


def _scheduled(
    piece: list[tuple[int, int, int]], table: RowTable, samples: bool
) -> ScheduledTokens:
    rows, starts, counts = np.array(piece, dtype=np.int64).T.copy()
    ends: Ints = starts + counts
    is_complete = (ends == table.input_lens[rows]) & samples
    return ScheduledTokens(rows, starts, counts, is_complete.astype(np.int64), ends)


def together(first: ScheduledTokens, second: ScheduledTokens) -> ScheduledTokens:
    """Both passes as one."""
    columns = zip(first[:5], second[:5], strict=True)
    rows, starts, counts, num_sampled, ends = (np.concatenate(pair) for pair in columns)
    return ScheduledTokens(rows, starts, counts, num_sampled, ends)
