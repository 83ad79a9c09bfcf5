"""What the shards are told and answer, in plain values: no transport, no protobuf."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from text_generation_router.errors import GenerationError
from text_generation_router.request import FinishReason


class LostStepError(GenerationError):
    """It is not known what the shards have computed: their answer is lost or inconsistent."""


class SilentShardError(LostStepError):
    """A shard does not answer a call that other shards have answered: no step is possible."""


class GoneShardError(LostStepError):
    """A shard has ended, and with it everything that the shards held."""


class NoShardsError(GenerationError):
    """The shards are lost and will not be replaced."""


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A receipt for the rows on the shards."""

    id: int
    # Running requests, in row order.
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrammarResult:
    """The shards' answer about a grammar."""

    # Why it can not be used, in a sentence.
    error: str = ""
    # Otherwise the fewest tokens of a text.
    min_tokens: int = 0
    # Not 0, with an error: too many grammars are being compiled; retry after this many seconds.
    retry_after_s: int = 0


@dataclass(frozen=True)
class StepResult:
    """The answer to one Prefill or Decode: parallel columns, one entry per request or token.

    Requests that rested, or whose input is incomplete, do not occur.
    """

    request_ids: Sequence[int]
    # The tokens of one request follow one another.
    token_ids: Sequence[int]
    # By token; not finite where a log-probability is not defined.
    logprobs: Sequence[float]
    # By request. Not None: it ended with its last token and its row is already free.
    finish_reasons: Sequence[FinishReason | None]
    # The rows after this step; None when every request ended.
    batch: CachedBatch | None
    # Tokens of each request; empty: one each.
    token_counts: Sequence[int] = ()
    # Alternatives of each token in the two columns below; empty: none.
    top_token_counts: Sequence[int] = ()
    top_token_ids: Sequence[int] = ()
    top_token_logprobs: Sequence[float] = ()
    # By request, one value per prompt token; the first is NaN.
    prefill_logprobs: Mapping[int, Sequence[float]] = field(default_factory=dict)
    # By request, one rank per prompt token but the first: see PrefillLogprobs in generate.proto.
    prefill_ranks: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # By request, ids and log-probabilities of the best alternatives of each prompt token but the
    # first: concatenated, equally many for each token.
    prefill_top_tokens: Mapping[int, tuple[Sequence[int], Sequence[float]]] = field(
        default_factory=dict
    )
    # By request, the pooled hidden state of its prompt, and scores; see PrefillOutput.
    pooled_prompts: Mapping[int, bytes] = field(default_factory=dict)
    token_scores: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    # By request, a sentence: it alone failed; its row is free, and its token, if any, is invalid.
    errors: Mapping[int, str] = field(default_factory=dict)
    forward_ns: int = 0
    decode_ns: int = 0
    # None when no rows joined.
    concat_ns: int | None = None
    # Duration of this step on each rank; empty: there is one rank.
    shard_ns: Sequence[int] = ()

    def is_answer_to(self, asked: Set[int], running: Set[int]) -> bool:
        """Whether exactly `asked` got tokens, and the remaining rows are `running` less `ended`."""
        counts = self.counts
        if not len(counts) == len(self.request_ids) == len(self.finish_reasons):
            return False
        if min(counts, default=1) < 1 or not sum(counts) == len(self.token_ids) == len(
            self.logprobs
        ):
            return False
        left = () if self.batch is None else self.batch.request_ids
        return asked == set(self.request_ids) and running - self.ended == set(left)

    @cached_property
    def ended(self) -> Set[int]:
        """The requests whose rows are free after this step."""
        if not any(self.finish_reasons):
            return self.errors.keys()
        columns = zip(self.request_ids, self.finish_reasons, strict=True)
        return {request_id for request_id, reason in columns if reason is not None} | (
            self.errors.keys()
        )

    @cached_property
    def counts(self) -> Sequence[int]:
        """How many tokens each request got."""
        return self.token_counts or (1,) * len(self.request_ids)

    def top_tokens(self) -> Sequence[tuple[Sequence[int], Sequence[float]]]:
        """The alternatives of each token: ids and log-probabilities, best first."""
        if not self.top_token_counts:
            return (((), ()),) * len(self.token_ids)
        ids, logprobs = self.top_token_ids, self.top_token_logprobs
        places = pairwise(accumulate(self.top_token_counts, initial=0))
        return [(ids[start:end], logprobs[start:end]) for start, end in places]
