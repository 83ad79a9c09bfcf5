"""What the scheduler asks of the shards, in plain values: no transport, no protobuf."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from text_generation_router.request import FinishReason
from text_generation_router.scheduler.entry import Entry


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A receipt for the rows that live on the shards."""

    id: int
    # The requests still running, in row order.
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one Prefill or Decode: parallel columns, one entry a request."""

    request_ids: Sequence[int]
    token_ids: Sequence[int]
    # Not finite where a log-probability is not defined.
    logprobs: Sequence[float]
    # Not None: the request ended with this token and its row is already free.
    finish_reasons: Sequence[FinishReason | None]
    # What runs on after this step; None when every request ended.
    batch: CachedBatch | None
    # How many alternatives each request has in the two columns below; empty: none has any.
    top_token_counts: Sequence[int] = ()
    top_token_ids: Sequence[int] = ()
    top_token_logprobs: Sequence[float] = ()
    # By request, one value a prompt token; the first is NaN.
    prefill_logprobs: Mapping[int, Sequence[float]] = field(default_factory=dict)
    # By request, a sentence: it failed alone, its row is free and its token means nothing.
    errors: Mapping[int, str] = field(default_factory=dict)
    forward_ns: int = 0
    decode_ns: int = 0
    # None when nothing was joined.
    concat_ns: int | None = None

    def is_answer_to(self, asked: Set[int], running: Set[int]) -> bool:
        """Whether exactly `asked` got a token and the rows left are `running` less the finished."""
        columns = zip(self.request_ids, self.finish_reasons, strict=True)
        finished = {request_id for request_id, reason in columns if reason is not None}
        finished |= self.errors.keys()
        left = () if self.batch is None else self.batch.request_ids
        return asked == set(self.request_ids) and running - finished == set(left)

    def top_tokens(self) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        """The alternatives of each request in turn: ids and log-probabilities, best first."""
        start = 0
        for num in self.top_token_counts or (0,) * len(self.request_ids):
            end = start + num
            yield self.top_token_ids[start:end], self.top_token_logprobs[start:end]
            start = end


class Shards(Protocol):
    """All shards of the model as one. Every method raises GenerationError when a shard fails.

    One Prefill, Decode or FilterBatch is under way at a time.
    """

    async def prefill(
        self, batch_id: int, entries: Sequence[Entry], cached_batch_id: int | None
    ) -> StepResult:
        """Computes the inputs of `entries` and their first tokens.

        With `cached_batch_id` the rows join that batch, which keeps its id; if this fails, the
        cached batch is as it was and the new rows are free.
        """
        ...

    async def decode(
        self, batch_ids: Sequence[int], grown_blocks: Sequence[tuple[int, int]]
    ) -> StepResult:
        """Computes one token for every row of the batches, which become one.

        `grown_blocks`: (request id, new last block of its table), applied before the step.
        """
        ...

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """Keeps the rows of `request_ids` (not empty) and frees the others."""
        ...

    async def clear_cache(self, batch_id: int | None) -> None:
        """Frees all rows of a batch, or of all batches; an unknown id is no error."""
        ...

    async def compile_grammar(self, grammar: str, timeout_s: float) -> tuple[str, int]:
        """Has a grammar in llguidance's form compiled, beside the steps; raises TimeoutError.

        Returns a sentence if it can not be used (else ""), and the fewest tokens it needs.
        """
        ...

    async def health(self) -> None:
        """Returns while every shard takes work."""
        ...
