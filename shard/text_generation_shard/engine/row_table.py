"""The state of every running request, one row each, and what it reads of its prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from torch import Tensor

from text_generation_shard.arrays import NO_INTS, Doubles, Flags, Ints, Tokens
from text_generation_shard.device.base import RowState, ScheduledTokens
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.grammar import Grammar
from text_generation_shard.grammars.masks import Constraint
from text_generation_shard.sampling import SamplingTable


class PromptPart(NamedTuple):
    """What one pass has found in the prompt of a row. Its tensors are valid after the pass has
    ended."""

    row: int
    # Of the input tokens that follow those of the pass, if requested; and the best tokens there.
    logprobs: pb.PrefillLogprobs
    top_tokens: pb.PrefillTopTokens
    # [hidden_size] float64: the sum of the hidden states, or the last one.
    pooled: Tensor | None
    # [ids] float32 log-probabilities.
    scores: Tensor | None


class PromptOutput:
    """Owns what one request reads of its prompt, as far as computed."""

    def __init__(self, request: pb.Request) -> None:
        self.request = request
        self._logprobs = pb.PrefillLogprobs(request_id=request.id, logprobs=[float("nan")])
        self._top_tokens = pb.PrefillTopTokens(request_id=request.id)
        self._scores: Sequence[float] = ()
        self._total: Doubles | None = None

    def add(self, part: PromptPart) -> None:
        """Add the next pass."""
        self._logprobs.MergeFrom(part.logprobs)
        self._top_tokens.MergeFrom(part.top_tokens)
        if part.pooled is not None:
            found: Doubles = part.pooled.numpy()
            self._total = found.copy() if self._total is None else self._total + found
        if part.scores is not None:
            self._scores = part.scores.tolist()

    def write(self, output: pb.StepResponse) -> None:
        """Write all into the output of the step in which the prompt was complete."""
        request = self.request
        if request.prefill_logprobs:
            output.prefill_logprobs.append(self._logprobs)
        if self._top_tokens.token_ids:
            output.prefill_top_tokens.append(self._top_tokens)
        if self._total is not None:
            divisor = request.num_prompt_tokens if request.pooling == pb.POOLING_MEAN else 1
            values = (self._total / divisor).astype(np.dtype("<f4")).tobytes()
            output.pooled_prompts.add(request_id=request.id, values=values)
        if self._scores:
            output.token_scores.add(request_id=request.id, logprobs=self._scores)


class RowTable:
    """Owns the state of every running request, in arrays of fixed size. Others write only token ids
    (draft tokens, results) and, behind verified draft tokens, `lens`.

    For a row with n = lens[row], the KV of n tokens is in the cache. While n < input_lens[row], its
    input is incomplete. Afterwards token_ids[row, :n + 1] are known, and the last of them is the
    input of the next step. Its block table covers all written tokens.
    """

    def __init__(
        self,
        capacity: int,
        max_total_tokens: int,
        block_size: int,
        num_cache_blocks: int,
        num_snapshots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.num_cache_blocks = num_cache_blocks
        self.num_snapshots = num_snapshots
        self.max_total_tokens = max_total_tokens
        width = -(-(max_total_tokens + 1) // block_size)
        self.lens: Ints = np.zeros(capacity, dtype=np.int64)
        self.input_lens: Ints = np.zeros(capacity, dtype=np.int64)
        self.prompt_lens: Ints = np.zeros(capacity, dtype=np.int64)
        # Most tokens of input and output together.
        self.longest: Ints = np.zeros(capacity, dtype=np.int64)
        self.token_ids: Tokens = np.zeros((capacity, max_total_tokens + 1), dtype=np.int32)
        self.block_tables: Ints = np.zeros((capacity, width), dtype=np.int64)
        self.num_blocks: Ints = np.zeros(capacity, dtype=np.int64)
        self.num_takes: Ints = np.zeros(capacity, dtype=np.int64)
        self.min_new_tokens: Ints = np.zeros(capacity, dtype=np.int64)
        self.ignore_eos: Flags = np.zeros(capacity, dtype=np.bool_)
        # Request → row, in the order in which requests joined, or were kept.
        self.running: dict[int, int] = {}
        self.sampling = SamplingTable(capacity)
        # By row, if requested: the number of best tokens to return.
        self.top_n_tokens: dict[int, int] = {}
        # By row, if its output must follow a grammar.
        self.constraints: dict[int, Constraint] = {}
        # Rows whose grammar has replaced a token so that the text ends within max_new_tokens.
        self.driven: set[int] = set()
        # By row, if requested, until its first token.
        self.prompt_outputs: dict[int, PromptOutput] = {}
        # By row in use.
        self._requests: dict[int, pb.Request] = {}
        self._ids = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        # The last answer of `rows_of`.
        self._last: tuple[Sequence[int], Ints] = ((), NO_INTS)

    def take(self, request: pb.Request, grammar: Grammar | None = None) -> int:
        """Give the request a row; BatchError, and no row taken, if the request is invalid or all
        rows are taken. `grammar`: the compiled form of its grammar."""
        self._check(request)
        known, blocks = len(request.input_ids), len(request.block_table)
        token_ids = np.array(list(request.input_ids), dtype=np.int32)
        block_table = np.array(list(request.block_table), dtype=np.int64)
        stopping, sampling = request.stopping_parameters, Sampling.from_wire(request.parameters)
        constraint = None if grammar is None else _constraint(request, grammar)
        row = self._free.pop()
        self.running[request.id] = row
        self._requests[row], self._ids[row] = request, request.id
        self._last = ((), NO_INTS)
        self.lens[row] = request.num_cached_tokens
        self.input_lens[row] = known
        self.prompt_lens[row] = request.num_prompt_tokens
        self.token_ids[row, :known] = token_ids
        self.block_tables[row, :blocks] = block_table
        self.num_blocks[row] = blocks
        self.num_takes[row] += 1
        self.longest[row] = request.num_prompt_tokens + stopping.max_new_tokens
        # A grammar decides when its text may end.
        self.min_new_tokens[row] = 0 if constraint else stopping.min_new_tokens
        self.ignore_eos[row] = stopping.ignore_eos_token and not constraint
        if request.top_n_tokens:
            self.top_n_tokens[row] = request.top_n_tokens
        self.sampling.set(row, sampling, stopping.stop_token_ids)
        if constraint:
            self.constraints[row] = constraint
        if request.prefill_logprobs or request.pooling or request.score_token_ids:
            self.prompt_outputs[row] = PromptOutput(request)
        return row

    def _check(self, request: pb.Request) -> None:
        known, prompt = len(request.input_ids), request.num_prompt_tokens
        cached, blocks = request.num_cached_tokens, len(request.block_table)
        most_new = request.stopping_parameters.max_new_tokens
        most_blocks = self.block_tables.shape[1]
        if not (
            cached < known <= self.max_total_tokens
            and 0 < prompt <= known
            and prompt + most_new <= self.max_total_tokens
            and cached < blocks * self.block_size
            and blocks <= most_blocks
            and not (cached and request.pooling == pb.POOLING_MEAN)
        ):
            raise BatchError(
                f"request {request.id} is not possible: of {known} tokens, {prompt} of them its "
                f"prompt, {cached} are cached, in {blocks} of at most {most_blocks} blocks of "
                f"{self.block_size}; {most_new} new ones may follow, and all can be "
                f"{self.max_total_tokens} at most"
            )
        self._check_block(request.id, max(request.block_table, default=0))
        self._check_snapshots(request)
        if request.id in self.running:
            raise BatchError(f"request {request.id} is running already")
        if not self._free:
            raise BatchError(f"all {len(self._ids)} rows are taken")

    def _check_block(self, request_id: int, block: int) -> None:
        if block >= self.num_cache_blocks:
            raise BatchError(
                f"request {request_id}: there is no block {block}, the cache has "
                f"{self.num_cache_blocks}"
            )

    def _check_snapshots(self, request: pb.Request) -> None:
        begins_from, stores = _snapshot(request), _stores(request)
        ends = [request.num_cached_tokens, *(end for end, _ in stores)]
        used = [-1 if begins_from is None else begins_from, *(snapshot for _, snapshot in stores)]
        is_ascending = ends == sorted(set(ends)) and ends[-1] <= len(request.input_ids)
        if not is_ascending or max(used) >= self.num_snapshots:
            raise BatchError(
                f"request {request.id}: {len(request.input_ids)} tokens, {ends[0]} of them cached, "
                f"can not begin from snapshot {begins_from} and be stored as (tokens, snapshot) "
                f"{stores}: there are {self.num_snapshots} snapshots"
            )

    def release(self, rows: Sequence[int]) -> None:
        """Free rows and drop their state."""
        for row in rows:
            request = self._requests.pop(row)
            del self.running[request.id]
            self.top_n_tokens.pop(row, None)
            self.constraints.pop(row, None)
            self.driven.discard(row)
            self.prompt_outputs.pop(row, None)
            self._free.append(row)
        self._last = ((), NO_INTS)

    def keep(self, request_ids: Sequence[int]) -> None:
        """Keep only these running requests, in this order."""
        kept = {request_id: self.running[request_id] for request_id in request_ids}
        self.release([row for item, row in self.running.items() if item not in kept])
        self.running = kept

    def rows_of(self, request_ids: Sequence[int], may_have_ended: bool) -> Ints:
        """The rows of running requests. BatchError if one is not running or is named twice; with
        `may_have_ended`, those that are not running are left out. As long as the rows are the same
        it is the same array: sampling parameters of a step are cached by it."""
        if request_ids != self._last[0]:
            running = self.running
            others = [item for item in request_ids if item not in running]
            if others and not may_have_ended:
                raise BatchError(f"requests {others} are not running")
            rows = [running[item] for item in request_ids if item in running]
            if len(set(rows)) < len(rows):
                raise BatchError(f"a request is named twice in {list(request_ids)}")
            self._last = request_ids, np.array(rows, dtype=np.int64)
        return self._last[1]

    def advance(self, passes: Sequence[ScheduledTokens]) -> None:
        """Count the tokens of launched passes as cached: the device runs passes in order."""
        for scheduled in passes:
            self.lens[scheduled.rows] = scheduled.ends

    def rewind(self, passes: Sequence[ScheduledTokens]) -> None:
        """Undo `advance`: the passes failed."""
        for scheduled in reversed(passes):
            self.lens[scheduled.rows] = scheduled.starts

    def depend_on_tokens(self, rows: Ints) -> bool:
        """Whether the choice for one of these rows depends on its earlier tokens."""
        return self.sampling.depends_on_tokens(rows) or self.are_constrained(rows)

    def are_constrained(self, rows: Ints) -> bool:
        """Whether one of these rows must follow a grammar."""
        return not self.constraints.keys().isdisjoint(rows.tolist())

    def stops(self, row: int, token_id: int, position: int) -> bool:
        """Whether a token at a position is a stop token of the row. Before `min_new_tokens` it ends
        nothing: a grammar may require it there."""
        if token_id not in self.sampling.stop_token_ids.get(row, ()):
            return False
        request = self._requests[row]
        least = request.stopping_parameters.min_new_tokens
        return bool(position - request.num_prompt_tokens >= least)

    def ids(self, rows: Sequence[int]) -> list[int]:
        """The requests that taken rows belong to."""
        return list(map(self._ids.__getitem__, rows))

    def grow(self, request_id: int, block: int) -> None:
        """Append a block to a running request's table."""
        row = self.running.get(request_id)
        if row is None:
            raise BatchError(f"request {request_id} is not running, its table can not grow")
        held = int(self.num_blocks[row])
        if held == self.block_tables.shape[1]:
            raise BatchError(f"request {request_id} has all blocks its longest context needs")
        self._check_block(request_id, block)
        self.block_tables[row, held] = block
        self.num_blocks[row] += 1

    def grow_once(self, request_id: int, block: int) -> None:
        """Append a block unless the table already has it."""
        row = self.running.get(request_id)
        if row is None or block not in self.block_tables[row, : self.num_blocks[row]]:
            self.grow(request_id, block)

    def covered(self, rows: Ints) -> Ints:
        """Capacity of each row's blocks, in tokens: [R]."""
        return self.num_blocks[rows] * self.block_size

    def states(self, scheduled: ScheduledTokens) -> tuple[RowState, ...]:
        """See ForwardBatch.states."""
        columns = scheduled.rows.tolist(), scheduled.starts.tolist(), scheduled.ends.tolist()
        return tuple(map(self._state, *columns))

    def _state(self, row: int, start: int, end: int) -> RowState:
        request = self._requests[row]
        is_first = start == request.num_cached_tokens
        stores = tuple(pair for pair in _stores(request) if start < pair[0] <= end)
        return RowState(row, is_first, _snapshot(request) if is_first else None, stores)


def _constraint(request: pb.Request, grammar: Grammar) -> Constraint:
    """The state of a grammar after the tokens generated before a preemption."""
    stopping = request.stopping_parameters
    # A grammar can not ignore an end token; it delays it as long as possible.
    least = stopping.max_new_tokens if stopping.ignore_eos_token else stopping.min_new_tokens
    generated = request.input_ids[request.num_prompt_tokens :]
    return Constraint(grammar, generated, stopping.max_new_tokens, least)


def _snapshot(request: pb.Request) -> int | None:
    """The snapshot that the row's state begins from; None: it begins empty."""
    return request.snapshot if request.HasField("snapshot") else None


def _stores(request: pb.Request) -> list[tuple[int, int]]:
    """(number of tokens, snapshot): the state after them is stored as this snapshot."""
    return list(zip(request.snapshot_positions, request.snapshot_places, strict=True))
