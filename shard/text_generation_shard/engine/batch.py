"""What runs on the shard: requests as they were asked for, and batches as lists of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.grammars.constraint import Grammar
from text_generation_shard.grammars.guard import AnyConstraint, begin
from text_generation_shard.sampling.params import SamplingParams


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
    # Tokens behind num_cached_tokens that are computed at once; 0: all.
    chunk_len: int = 0

    @property
    def first_end(self) -> int:
        """Tokens whose KV is there once the pass that brings this request is done."""
        if self.chunk_len:
            return self.num_cached_tokens + self.chunk_len
        return len(self.input_ids)

    def constraint(self) -> AnyConstraint | None:
        """Its place in its grammar, behind what was generated before a preemption."""
        if self.grammar is None:
            return None
        # An end token is not ignored for a grammar, but it comes as late as can be.
        least = self.max_new_tokens if self.ignore_eos_token else self.min_new_tokens
        generated = self.input_ids[self.num_prompt_tokens :]
        return begin(self.grammar, generated, self.max_new_tokens, least)


@dataclass(slots=True)
class CachedBatch:
    """Requests that run together. Owned by the engine."""

    id: int
    request_ids: list[int]
    # [R] indices into the RowTable, in the order of request_ids. Replaced, never changed.
    rows: Ints

    def keep(self, places: Sequence[int]) -> None:
        """Go on with the requests at `places` only, in that order."""
        self.request_ids = [self.request_ids[place] for place in places]
        self.rows = self.rows[list(places)]

    def join(self, other: "CachedBatch") -> None:
        """Append the rows of `other`."""
        self.request_ids = self.request_ids + other.request_ids
        self.rows = np.concatenate((self.rows, other.rows))
