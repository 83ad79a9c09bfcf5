"""What the scheduler asks of the shards, in plain values: no transport, no protobuf."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

from text_generation_router.errors import GenerationError
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.entry import Entry


class LostStepError(GenerationError):
    """Nobody can say what the shards have computed: their answer is lost or makes no sense."""


class SilentShardError(LostStepError):
    """A shard does not answer what others have answered: nothing can be computed any more."""


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A receipt for the rows that live on the shards."""

    id: int
    # The requests still running, in row order.
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """How the rows of a batch that is there go on in a step."""

    # (request id, new last block of its table), applied before the step.
    grown_blocks: Sequence[tuple[int, int]] = ()
    # (request id, how many more tokens of its input are computed); others of that kind rest.
    chunks: Sequence[tuple[int, int]] = ()
    # Tokens guessed at most for every request that gets one; the tables have room for them.
    speculate: int = 0
    # The step before is not answered yet: who ends in it is passed over, and if nobody is left the
    # answer is empty.
    is_ahead: bool = False


@dataclass(frozen=True, slots=True)
class GrammarResult:
    """What the shards say about a grammar."""

    # A sentence if it can not be used.
    error: str = ""
    # The fewest tokens it needs, if it can.
    min_tokens: int = 0
    # Not 0, with an error: nothing is known about it, since too many are being compiled; ask again
    # after so many seconds.
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one Prefill or Decode: parallel columns, one entry a request or a token.

    Requests that rested, or whose input is not computed yet, do not occur.
    """

    request_ids: Sequence[int]
    # The tokens of one request follow one another.
    token_ids: Sequence[int]
    # By token; not finite where a log-probability is not defined.
    logprobs: Sequence[float]
    # By request. Not None: it ended with its last token and its row is already free.
    finish_reasons: Sequence[FinishReason | None]
    # What runs on after this step; None when every request ended.
    batch: CachedBatch | None
    # By request, how many tokens are its own; empty: one each.
    token_counts: Sequence[int] = ()
    # By token, how many alternatives it has in the two columns below; empty: none has any.
    top_token_counts: Sequence[int] = ()
    top_token_ids: Sequence[int] = ()
    top_token_logprobs: Sequence[float] = ()
    # By request, one value a prompt token; the first is NaN.
    prefill_logprobs: Mapping[int, Sequence[float]] = field(default_factory=dict)
    # The ranks of the same prompts' tokens but the first: see PrefillLogprobs in generate.proto.
    prefill_ranks: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # By request, ids and log-probabilities of the best tokens in place of each prompt token but the
    # first: one after the other, as many in each place.
    prefill_top_tokens: Mapping[int, tuple[Sequence[int], Sequence[float]]] = field(
        default_factory=dict
    )
    # By request, the hidden state that stands for its prompt, and scores; see PrefillOutput.
    pooled_prompts: Mapping[int, bytes] = field(default_factory=dict)
    token_scores: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    # By request, a sentence: it failed alone, its row is free and its token, if any, means nothing.
    errors: Mapping[int, str] = field(default_factory=dict)
    forward_ns: int = 0
    decode_ns: int = 0
    # None when nothing was joined.
    concat_ns: int | None = None
    # By rank, how long it took to compute this step; empty: there is one rank.
    shard_ns: Sequence[int] = ()

    def is_answer_to(self, asked: Set[int], running: Set[int]) -> bool:
        """Whether exactly `asked` got tokens and the rows left are `running` less the finished."""
        counts = self.counts
        if not len(counts) == len(self.request_ids) == len(self.finish_reasons):
            return False
        if min(counts, default=1) < 1 or not sum(counts) == len(self.token_ids) == len(
            self.logprobs
        ):
            return False
        left = () if self.batch is None else self.batch.request_ids
        return asked == set(self.request_ids) and running - self.ended == set(left)

    @property
    def ended(self) -> Set[int]:
        """The requests whose rows are free now."""
        columns = zip(self.request_ids, self.finish_reasons, strict=True)
        return {request_id for request_id, reason in columns if reason is not None} | (
            self.errors.keys()
        )

    @property
    def counts(self) -> Sequence[int]:
        """How many tokens each request got."""
        return self.token_counts or (1,) * len(self.request_ids)

    def top_tokens(self) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        """The alternatives of each token in turn: ids and log-probabilities, best first."""
        if not self.top_token_counts:
            yield from repeat(((), ()), len(self.token_ids))
        start = 0
        for num in self.top_token_counts:
            end = start + num
            yield self.top_token_ids[start:end], self.top_token_logprobs[start:end]
            start = end


class Shards(Protocol):
    """All shards of the model as one. Every method raises GenerationError when a shard fails, and
    LostStepError when it may have computed something all the same.

    One Prefill, Decode or FilterBatch is under way at a time, but for a Decode that is `is_ahead`:
    it may be asked for while another Decode is under way, and is computed behind it.
    """

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """Computes the first `chunk_len` uncached tokens of `entries`; those complete get a token.

        With `cached_batch_id` the rows join that batch, which keeps its id. With `advance` its rows
        go on in the same pass, before the new ones: these can share what those write. If it fails,
        the cached batch is as it was and the new rows are free.
        """
        ...

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """Advances every row of the batches, which become one."""
        ...

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """Keeps the rows of `request_ids` (not empty) and frees the others."""
        ...

    async def clear_cache(self, batch_id: int | None) -> None:
        """Frees all rows of a batch, or of all batches; an unknown id is no error."""
        ...

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """Has a grammar in llguidance's form compiled, beside the steps; raises TimeoutError."""
        ...

    async def health(self) -> None:
        """Returns while every shard takes work."""
        ...
