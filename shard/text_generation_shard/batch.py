"""Where requests live on the shard: rows of one fixed table, and batches as lists of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from text_generation_shard.errors import BatchError
from text_generation_shard.grammar import Constraint, Grammar
from text_generation_shard.sampling import SamplingColumns, SamplingParams


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What the router asked for; see Request in generate.proto."""

    id: int
    input_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_table: Sequence[int]
    sampling: SamplingParams
    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos_token: bool = False
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    grammar: Grammar | None = None

    def constraint(self) -> Constraint | None:
        """Its place in its grammar, behind what was generated before a preemption."""
        if self.grammar is None:
            return None
        # An end token is not ignored for a grammar, but it comes as late as can be.
        least = self.max_new_tokens if self.ignore_eos_token else self.min_new_tokens
        generated = self.input_ids[self.num_prompt_tokens :]
        return Constraint(self.grammar, generated, self.max_new_tokens, least)


@dataclass(slots=True)
class CachedBatch:
    """Requests that run together. Owned by the engine; `columns` is dropped when rows change."""

    id: int
    request_ids: list[int]
    # [R] indices into the RowTable, in the order of request_ids.
    rows: Tensor
    columns: SamplingColumns | None = field(default=None)

    def keep(self, places: Sequence[int]) -> None:
        """Go on with the requests at `places` only, in that order."""
        self.request_ids = [self.request_ids[place] for place in places]
        self.rows = self.rows[torch.tensor(places, dtype=torch.int64)]
        self.columns = None

    def join(self, other: "CachedBatch") -> None:
        """Append the rows of `other`."""
        self.request_ids = self.request_ids + other.request_ids
        self.rows = torch.cat((self.rows, other.rows))
        self.columns = None


class RowTable:
    """Owns the state of every running request, one row each, in host tensors of fixed size.

    Of a row with n = lens[row]: the KV of n tokens is in the cache, token_ids[row, :n + 1] are
    known (the last of them is the input of the next step), and block_tables covers what is written.
    """

    def __init__(self, capacity: int, max_total_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_total_tokens = max_total_tokens
        width = -(-(max_total_tokens + 1) // block_size)
        self.lens = torch.zeros(capacity, dtype=torch.int64)
        self.prompt_lens = torch.zeros(capacity, dtype=torch.int64)
        self.token_ids = torch.zeros(capacity, max_total_tokens + 1, dtype=torch.int32)
        self.block_tables = torch.zeros(capacity, width, dtype=torch.int64)
        self.max_new_tokens = torch.zeros(capacity, dtype=torch.int64)
        self.min_new_tokens = torch.zeros(capacity, dtype=torch.int64)
        self.ignore_eos = torch.zeros(capacity, dtype=torch.bool)
        self.requests: list[RowRequest | None] = [None] * capacity
        # Of the rows whose output must follow a grammar.
        self.constraints: dict[int, Constraint] = {}
        self._num_blocks = torch.zeros(capacity, dtype=torch.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self._rows: dict[int, int] = {}

    @property
    def num_taken(self) -> int:
        """Rows in use."""
        return len(self.requests) - len(self._free)

    def take(self, request: RowRequest) -> int:
        """A row for the request; BatchError, and no row taken, if there is none or the request
        makes no sense."""
        known = len(request.input_ids)
        if known > self.max_total_tokens or not 0 < request.num_prompt_tokens <= known:
            raise BatchError(
                f"request {request.id}: {known} tokens of which {request.num_prompt_tokens} are "
                f"its prompt; at most {self.max_total_tokens} tokens are possible"
            )
        if not 0 <= request.num_cached_tokens < known:
            raise BatchError(
                f"request {request.id}: {request.num_cached_tokens} cached of {known} tokens; "
                "at least one token must be left to compute"
            )
        if request.num_prompt_tokens + request.max_new_tokens > self.max_total_tokens:
            raise BatchError(
                f"request {request.id}: {request.num_prompt_tokens} prompt + "
                f"{request.max_new_tokens} new tokens exceed {self.max_total_tokens}"
            )
        blocks = len(request.block_table)
        if blocks * self.block_size < known or blocks > self.block_tables.shape[1]:
            raise BatchError(
                f"request {request.id}: {blocks} blocks of {self.block_size} are not right for "
                f"{known} tokens; a request has at most {self.block_tables.shape[1]} blocks"
            )
        if request.id in self._rows:
            raise BatchError(f"request {request.id} is running already")
        if not self._free:
            raise BatchError(f"all {len(self.requests)} rows are taken")
        token_ids = torch.tensor(request.input_ids, dtype=torch.int32)
        block_table = torch.tensor(request.block_table, dtype=torch.int64)
        constraint = request.constraint()
        row = self._free.pop()
        self._rows[request.id] = row
        self.requests[row] = request
        self.lens[row] = request.num_cached_tokens
        self.prompt_lens[row] = request.num_prompt_tokens
        self.token_ids[row, :known] = token_ids
        self.block_tables[row, :blocks] = block_table
        self._num_blocks[row] = blocks
        self.max_new_tokens[row] = request.max_new_tokens
        # A grammar decides by itself when its text may end.
        self.min_new_tokens[row] = 0 if constraint else request.min_new_tokens
        self.ignore_eos[row] = request.ignore_eos_token and not constraint
        if constraint:
            self.constraints[row] = constraint
        return row

    def release(self, rows: Sequence[int]) -> None:
        """Give rows back; what they held is forgotten."""
        for row in rows:
            request = self.requests[row]
            assert request is not None, "a row is released once"
            del self._rows[request.id]
            self.requests[row] = None
            self.constraints.pop(row, None)
            self._free.append(row)

    def grow(self, request_id: int, block: int) -> None:
        """Append a block to a running request's table."""
        row = self._rows.get(request_id)
        if row is None:
            raise BatchError(f"request {request_id} is not running, its table can not grow")
        held = int(self._num_blocks[row])
        if held == self.block_tables.shape[1]:
            raise BatchError(f"request {request_id} has all blocks its longest context needs")
        self.block_tables[row, held] = block
        self._num_blocks[row] += 1

    def check_covered(self, rows: Tensor) -> None:
        """BatchError unless each row's table has room for its next token."""
        uncovered = self.lens[rows] >= self._num_blocks[rows] * self.block_size
        if bool(uncovered.any()):
            ids = [self.request(row).id for row in rows[uncovered].tolist()]
            raise BatchError(f"requests {ids} have no block for their next token")

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where the tokens at `positions` of `rows` (both [T]) are written."""
        blocks = self.block_tables[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def tables(self, rows: Tensor, longest: int) -> Tensor:
        """Block tables of `rows`, as wide as a context of `longest` tokens needs: [R, width]."""
        return self.block_tables[rows, : -(-longest // self.block_size)]

    def constraints_of(self, rows: Tensor) -> dict[int, Constraint]:
        """The constraints of those of `rows` that have one, by place in `rows`."""
        if not self.constraints:
            return {}
        places = enumerate(rows.tolist())
        return {place: self.constraints[row] for place, row in places if row in self.constraints}

    def request(self, row: int) -> RowRequest:
        """The request a taken row belongs to."""
        request = self.requests[row]
        assert request is not None, "only taken rows are asked for"
        return request
