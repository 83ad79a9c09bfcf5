"""The state of every running request, one row each."""

from collections.abc import Sequence

import numpy as np
from text_generation_proto import pb

from text_generation_shard.arrays import Flags, Ints, Tokens
from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.device.forward import RowState
from text_generation_shard.engine.prompt_outputs import PromptOutput
from text_generation_shard.engine.step import NewRequest
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.masks import Constraint
from text_generation_shard.sampling.table import SamplingTable


class RowTable:
    """Owns the state of every running request, in arrays of fixed size that only its methods write.

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
        # [R] rows in use, in the order of their requests. Replaced, never modified.
        self.running: Ints = np.empty(0, dtype=np.int64)
        self.sampling = SamplingTable(capacity)
        # By row, if requested: the number of best tokens to return.
        self.top_n_tokens: dict[int, int] = {}
        # By row, if its output must follow a grammar.
        self.constraints: dict[int, Constraint] = {}
        # Rows whose grammar has replaced a token so that the text ends within max_new_tokens.
        self.driven: set[int] = set()
        # By row, if requested, until its first token.
        self.prompt_outputs: dict[int, PromptOutput] = {}
        self._requests: list[NewRequest | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._rows: dict[int, int] = {}

    @property
    def num_taken(self) -> int:
        """Rows in use."""
        return len(self._requests) - len(self._free)

    def take(self, request: NewRequest) -> int:
        """Give the request a row; BatchError, and no row taken, if the request is invalid or all
        rows are taken."""
        self._check(request)
        known, blocks = len(request.input_ids), len(request.block_table)
        token_ids = np.array(request.input_ids, dtype=np.int32)
        block_table = np.array(request.block_table, dtype=np.int64)
        constraint = request.constraint()
        row = self._free.pop()
        self._rows[request.id] = row
        self._requests[row] = request
        self.lens[row] = request.num_cached_tokens
        self.input_lens[row] = known
        self.prompt_lens[row] = request.num_prompt_tokens
        self.token_ids[row, :known] = token_ids
        self.block_tables[row, :blocks] = block_table
        self.num_blocks[row] = blocks
        self.num_takes[row] += 1
        self.longest[row] = request.num_prompt_tokens + request.max_new_tokens
        # A grammar decides when its text may end.
        self.min_new_tokens[row] = 0 if constraint else request.min_new_tokens
        self.ignore_eos[row] = request.ignore_eos_token and not constraint
        if request.top_n_tokens:
            self.top_n_tokens[row] = request.top_n_tokens
        self.sampling.set(row, request.sampling, request.stop_token_ids)
        if constraint:
            self.constraints[row] = constraint
        if request.prefill_logprobs or request.pooling or request.score_token_ids:
            self.prompt_outputs[row] = PromptOutput(request)
        self.running = np.append(self.running, row)
        return row

    def _check(self, request: NewRequest) -> None:
        known, prompt, end = len(request.input_ids), request.num_prompt_tokens, request.first_end
        cached, blocks = request.num_cached_tokens, len(request.block_table)
        most_blocks = self.block_tables.shape[1]
        if not (
            0 <= cached < end <= known <= self.max_total_tokens
            and 0 < prompt <= known
            and prompt + request.max_new_tokens <= self.max_total_tokens
            and end <= blocks * self.block_size
            and blocks <= most_blocks
            and not (cached and request.pooling == pb.POOLING_MEAN)
        ):
            raise BatchError(
                f"request {request.id} is not possible: of {known} tokens, {prompt} of them its "
                f"prompt, {cached} are cached and {end} computed in its first step, in {blocks} "
                f"of at most {most_blocks} blocks of {self.block_size}; "
                f"{request.max_new_tokens} new ones may follow, and all can be "
                f"{self.max_total_tokens} at most"
            )
        self._check_block(request.id, max(request.block_table, default=0))
        self._check_snapshots(request)
        if request.id in self._rows:
            raise BatchError(f"request {request.id} is running already")
        if not self._free:
            raise BatchError(f"all {len(self._requests)} rows are taken")

    def _check_block(self, request_id: int, block: int) -> None:
        if block >= self.num_cache_blocks:
            raise BatchError(
                f"request {request_id}: there is no block {block}, the cache has "
                f"{self.num_cache_blocks}"
            )

    def _check_snapshots(self, request: NewRequest) -> None:
        begins_from, stores = request.snapshot, request.stores
        ends = [request.num_cached_tokens, *(end for end, _ in stores)]
        used = [-1 if begins_from is None else begins_from, *(snapshot for _, snapshot in stores)]
        is_ascending = ends == sorted(set(ends)) and ends[-1] <= len(request.input_ids)
        if not is_ascending or max(used) >= self.num_snapshots:
            raise BatchError(
                f"request {request.id}: {len(request.input_ids)} tokens, {ends[0]} of them cached, "
                f"can not begin from snapshot {begins_from} and be stored as (tokens, snapshot) "
                f"{list(stores)}: there are {self.num_snapshots} snapshots"
            )

    def release(self, rows: Sequence[int]) -> None:
        """Free rows and drop their state."""
        for row in rows:
            request = self._requests[row]
            assert request is not None, "a row is released once"
            del self._rows[request.id]
            self._requests[row] = None
            self.top_n_tokens.pop(row, None)
            self.constraints.pop(row, None)
            self.driven.discard(row)
            self.prompt_outputs.pop(row, None)
            self._free.append(row)
        if len(rows):
            self.running = self.running[~np.isin(self.running, rows)]

    def keep(self, request_ids: Sequence[int]) -> None:
        """Keep only these running requests, in this order."""
        kept: Ints = np.array([self._rows[item] for item in request_ids], dtype=np.int64)
        self.release(self.running[~np.isin(self.running, kept)].tolist())
        self.running = kept

    def advance(self, passes: Sequence[ScheduledTokens]) -> None:
        """Count the tokens of launched passes as cached: the device runs passes in order."""
        for scheduled in passes:
            self.lens[scheduled.rows] = scheduled.ends

    def rewind(self, passes: Sequence[ScheduledTokens]) -> None:
        """Undo `advance`: the passes failed."""
        for scheduled in reversed(passes):
            self.lens[scheduled.rows] = scheduled.starts

    def write(self, rows: Ints, positions: Ints, token_ids: Ints) -> None:
        """Write tokens at positions of rows: all [T]."""
        self.token_ids[rows, positions] = token_ids

    def set_lens(self, rows: Ints, lens: Ints) -> None:
        """Set the number of cached tokens of each row: both [R]."""
        self.lens[rows] = lens

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
        assert request is not None, "only running rows get tokens"
        return position - request.num_prompt_tokens >= request.min_new_tokens

    def row(self, request_id: int) -> int | None:
        """The row of a request; None if it is not running."""
        return self._rows.get(request_id)

    def has(self, row: int, request_id: int) -> bool:
        """Whether the row still belongs to this request."""
        return self._rows.get(request_id) == row

    def ids(self, rows: Sequence[int]) -> list[int]:
        """The requests that taken rows belong to."""
        return [request.id for row in rows if (request := self._requests[row]) is not None]

    def grow(self, request_id: int, block: int) -> None:
        """Append a block to a running request's table."""
        row = self._rows.get(request_id)
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
        row = self._rows.get(request_id)
        if row is None or block not in self.block_tables[row, : self.num_blocks[row]]:
            self.grow(request_id, block)

    def covered(self, rows: Ints) -> Ints:
        """Capacity of each row's blocks, in tokens: [R]."""
        return self.num_blocks[rows] * self.block_size

    def check_covered(self, rows: Ints, ends: Ints) -> None:
        """BatchError unless each row's blocks hold its tokens before `ends` [R]."""
        uncovered = ends > self.covered(rows)
        if any(uncovered.tolist()):
            ids = self.ids(rows[uncovered].tolist())
            raise BatchError(f"requests {ids} have no block for their next token")

    def is_unfinished(self, rows: Ints) -> Flags:
        """Whether the input of each row is incomplete: [R]."""
        return self.lens[rows] < self.input_lens[rows]

    def states(self, scheduled: ScheduledTokens) -> tuple[RowState, ...]:
        """See ForwardBatch.states."""
        columns = scheduled.rows.tolist(), scheduled.starts.tolist(), scheduled.ends.tolist()
        return tuple(map(self._state, *columns))

    def _state(self, row: int, start: int, end: int) -> RowState:
        request = self._requests[row]
        assert request is not None, "only running rows are computed"
        is_first = start == request.num_cached_tokens
        stores = tuple(pair for pair in request.stores if start < pair[0] <= end)
        return RowState(row, is_first, request.snapshot if is_first else None, stores)

    def tables(self, rows: Ints, longest: int) -> Ints:
        """Block tables of `rows`, wide enough for `longest` tokens: [R, width]."""
        return self.block_tables[rows, : -(-longest // self.block_size)]
