"""The engine's inputs as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from text_generation_process.sampling import Sampling
from text_generation_proto import pb

from text_generation_shard.grammars.grammar import Grammar
from text_generation_shard.grammars.masks import Constraint


class Costs(NamedTuple):
    """The times of steps, in nanoseconds."""

    # A step of one row, and one of a full batch.
    single_ns: int
    full_ns: int
    # What each prompt token adds, and what it adds for every 1024 preceding tokens.
    token_ns: int
    context_ns: int


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that gets a row; see Request in generate.proto."""

    id: int
    input_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_table: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos_token: bool = False
    stop_token_ids: Sequence[int] = ()
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    grammar: Grammar | None = None
    # Tokens after num_cached_tokens that the first step computes; 0: all.
    chunk_len: int = 0
    pooling: pb.Pooling = pb.POOLING_NONE
    # Tokens whose log-probabilities as the first new token are returned.
    score_token_ids: Sequence[int] = ()
    # The snapshot that the row's state begins from; None: it begins empty.
    snapshot: int | None = None
    # (number of tokens, snapshot): the state after them is stored as this snapshot.
    stores: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, message: pb.Request, grammar: Grammar | None) -> "NewRequest":
        """A request of a Prefill; `grammar`: the compiled form of its grammar. ValueError if
        parallel fields differ in length."""
        stopping = message.stopping_parameters
        stores = zip(message.snapshot_positions, message.snapshot_places, strict=True)
        return cls(
            id=message.id,
            input_ids=list(message.input_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            num_cached_tokens=message.num_cached_tokens,
            block_table=list(message.block_table),
            sampling=Sampling.from_wire(message.parameters),
            max_new_tokens=stopping.max_new_tokens,
            min_new_tokens=stopping.min_new_tokens,
            ignore_eos_token=stopping.ignore_eos_token,
            stop_token_ids=list(stopping.stop_token_ids),
            prefill_logprobs=message.prefill_logprobs,
            top_n_tokens=message.top_n_tokens,
            grammar=grammar,
            chunk_len=message.chunk_len,
            pooling=message.pooling,
            score_token_ids=list(message.score_token_ids),
            snapshot=message.snapshot if message.HasField("snapshot") else None,
            stores=list(stores),
        )

    @property
    def first_end(self) -> int:
        """Input tokens whose KV is in the cache after the first step of this request."""
        if self.chunk_len:
            return self.num_cached_tokens + self.chunk_len
        return len(self.input_ids)

    def constraint(self) -> Constraint | None:
        """The state of its grammar after the tokens generated before a preemption."""
        if self.grammar is None:
            return None
        # A grammar can not ignore an end token; it delays it as long as possible.
        least = self.max_new_tokens if self.ignore_eos_token else self.min_new_tokens
        generated = self.input_ids[self.num_prompt_tokens :]
        return Constraint(self.grammar, generated, self.max_new_tokens, least)


@dataclass(frozen=True, slots=True)
class StepInput:
    """The scheduled work of one step."""

    # Requests that get rows; their inputs, or the first parts of them, are computed.
    new_requests: Sequence[NewRequest] = ()
    # Whether running requests decode: each with a complete input gets one token or more.
    runs_on: bool = True
    # (request id, new last block).
    grown: Sequence[tuple[int, int]] = ()
    # (request id, number of its next input tokens to compute).
    chunks: Sequence[tuple[int, int]] = ()
    # Most tokens drafted per row.
    speculate: int = 0
    # Sent before the previous step was answered: some requests may have ended.
    is_ahead: bool = False

    @classmethod
    def of(
        cls, message: pb.Advance, runs_on: bool, new_requests: Sequence[NewRequest] = ()
    ) -> "StepInput":
        """The step of an Advance and of new requests. ValueError if parallel fields differ in
        length."""
        return cls(
            new_requests=new_requests,
            runs_on=runs_on,
            grown=list(zip(message.grown_request_ids, message.grown_block_ids, strict=True)),
            chunks=list(zip(message.chunk_request_ids, message.chunk_lens, strict=True)),
            speculate=message.speculate,
            is_ahead=message.is_ahead,
        )
