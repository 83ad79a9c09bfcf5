"""One step: its plan, the answer of the shards, and the way of its tokens to their clients. No
transport and no protobuf."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Literal, Protocol

from text_generation_router.errors import GenerationError, GrammarFailedError, RouterError
from text_generation_router.metrics import Metrics
from text_generation_router.request import FinishReason, PrefillOutput, TokenOutput
from text_generation_router.scheduler.entry import Entry, EntryState


class LostStepError(GenerationError):
    """It is not known what the shards have computed: their answer is lost or inconsistent."""


class SilentShardError(LostStepError):
    """A shard does not answer a call that other shards have answered: no step is possible."""


class GoneShardError(LostStepError):
    """A shard has ended, and with it everything that the shards held."""


class NoShardsError(GenerationError):
    """The shards are lost and will not be replaced."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what the shards compute, for which entries."""

    # New rows; empty: it is a Decode.
    admitted: list[Entry]
    # All running entries; those that are not new have rows on the shards.
    entries: dict[int, Entry]
    # Scheduled prompt tokens by entry; other unfinished prompts get none.
    chunks: dict[int, int]
    # Entries that get a token.
    asked: frozenset[int]
    # (entry id, new last block of its table), applied before the step.
    grown_blocks: Sequence[tuple[int, int]] = ()
    # Most draft tokens of each row that gets a token; the block tables have room for them.
    speculate: int = 0
    # The step before is not answered yet: rows that end in it are skipped, and without other rows
    # the answer is empty.
    is_ahead: bool = False

    @property
    def counts(self) -> dict[int, int]:
        """How many tokens each entry computes, in this order: one of each that decodes, then the
        prompts, which may share the blocks of those before them."""
        asked, chunks = self.asked, self.chunks
        return {i: 1 for i in self.entries if i in asked and i not in chunks} | chunks

    @property
    def num_decoding(self) -> int:
        """Entries that decode; the other ones in `asked` complete their prompts."""
        return len(self.asked - self.chunks.keys())

    def without(self, entry_ids: Set[int]) -> "Plan":
        """The rest of a plan made ahead, without entries that ended in the step before."""
        entries = {i: entry for i, entry in self.entries.items() if i not in entry_ids}
        return replace(self, entries=entries, asked=self.asked - entry_ids)


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


class Shards(Protocol):
    """The shards as the Batcher sees them: see `client.recovery.WatchedShards`."""

    num_losses: int
    error: GenerationError
    verdict: GenerationError | None
    on_loss: Callable[[], None]

    def step(
        self, plan: Plan, batch_id: int, cached_batch_id: int | None = None
    ) -> asyncio.Task[StepResult]: ...

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> Awaitable[CachedBatch]: ...

    def clear_cache(self, batch_id: int | None) -> Awaitable[None]: ...

    def health(self) -> Awaitable[None]: ...

    async def is_lost_with(self, error: GenerationError) -> bool: ...

    async def wait(self) -> None: ...


# Clients that get their tokens in one turn of the event loop. Then they write, and other tasks
# (/health, new requests) have a turn.
DELIVERIES_PER_TURN = 64


Method = Literal["prefill", "decode"]


class Delivery:
    """Makes the text of each step and gives every client its outputs; turns what the Batcher does
    into metrics."""

    def __init__(self, metrics: Metrics, end: Callable[[Entry, RouterError | None], None]) -> None:
        """`end` ends an entry, with its error if there is one."""
        self._metrics = metrics
        self._end = end
        self.drop_s = 0.0
        """Time to drop rows on the shards since the last delivery, which counts it."""
        # Of the present delivery: times between tokens, and tokens gained by speculation, each with
        # the number of entries. Most entries of a step have the same.
        self._gaps: Counter[float] = Counter()
        self._skipped: Counter[int] = Counter()

    def note_admission(self, plan: Plan, reason: str) -> None:
        """Entries were admitted; if they join others, for this reason."""
        metrics = self._metrics
        metrics.batch_next_size.observe(len(plan.admitted))
        for entry in plan.admitted:
            metrics.prefix_cache_queried_tokens.inc(entry.num_inputs)
            metrics.prefix_cache_hit_tokens.inc(entry.num_cached_tokens)
        if len(plan.admitted) < len(plan.entries):
            metrics.batch_concat.inc(reason=reason)

    def note_step(self, method: Method, duration_s: float, result: StepResult) -> None:
        """A step succeeded."""
        metrics = self._metrics
        metrics.batch_inference_success.inc(method=method)
        if not (result.request_ids or result.forward_ns):
            return  # launched ahead, and all its rows had ended
        metrics.batch_inference_duration.observe(duration_s, method=method)
        metrics.batch_forward_duration.observe(result.forward_ns / 1e9, method=method)
        metrics.batch_decode_duration.observe(result.decode_ns / 1e9, method=method)
        if result.concat_ns is not None:
            metrics.batch_concat_duration.observe(result.concat_ns / 1e9, method="decode")
        for rank, shard_ns in enumerate(result.shard_ns):
            metrics.batch_shard_duration.observe(shard_ns / 1e9, rank=str(rank))

    async def deliver(self, plan: Plan, result: StepResult, method: Method) -> None:
        """Delivers one step, some entries in each turn of the event loop."""
        now = time.perf_counter()
        for request_id, message in result.errors.items():
            entry = plan.entries[request_id]
            failure = GrammarFailedError if entry.request.grammar else GenerationError
            self._end(entry, failure(message))
        columns = zip(result.token_ids, result.logprobs, result.top_tokens(), strict=True)
        answered = zip(result.request_ids, result.counts, result.finish_reasons, strict=True)
        for place, (request_id, num, finish_reason) in enumerate(answered, start=1):
            entry, tokens = plan.entries[request_id], list(islice(columns, num))
            if entry.state is not EntryState.ENDED and request_id not in result.errors:
                self._deliver(entry, tokens, finish_reason, result, now)
            if place % DELIVERIES_PER_TURN == 0:
                await asyncio.sleep(0)
        metrics = self._metrics
        for gap_s, times in self._gaps.items():
            metrics.request_inter_token_latency_duration.observe(gap_s, times)
        for num_skipped, times in self._skipped.items():
            metrics.request_skipped_tokens.observe(num_skipped, times)
        self._gaps.clear()
        self._skipped.clear()
        duration_s = time.perf_counter() - now + self.drop_s
        metrics.batch_filter_duration.observe(duration_s, method=method)
        self.drop_s = 0.0

    def _deliver(
        self,
        entry: Entry,
        tokens: Sequence[tuple[int, float, tuple[Sequence[int], Sequence[float]]]],
        finish_reason: FinishReason | None,
        result: StepResult,
        now: float,
    ) -> None:
        """Gives one client the tokens of a step; tokens behind a stop string are dropped."""
        if (prefill_logprobs := result.prefill_logprobs.get(entry.id)) is not None:
            tops = result.prefill_top_tokens.get(entry.id, ((), ()))
            ranks = result.prefill_ranks.get(entry.id, ())
            entry.prefill = entry.read_prompt(prefill_logprobs, tops, ranks)
        elif entry.is_prompt_only:
            pooled = result.pooled_prompts.get(entry.id, b"")
            scores = result.token_scores.get(entry.id, ())
            entry.prefill = PrefillOutput((), pooled=pooled, scores=scores)
        outputs: list[TokenOutput] = []
        for token_id, logprob, top_tokens in tokens:
            reason = finish_reason if len(outputs) + 1 == len(tokens) else None
            output = entry.step(token_id, logprob, reason, top_tokens)
            outputs.append(output)
            if output.generated is not None:
                self._end(entry, None)
                break
        entry.deliver(outputs)
        if not entry.is_prompt_only:
            self._note_tokens(entry, len(outputs), now)

    def _note_tokens(self, entry: Entry, num_tokens: int, now: float) -> None:
        if entry.last_delivered is None:
            self._metrics.request_time_to_first_token_duration.observe(now - entry.queued)
        else:
            self._gaps[now - entry.last_delivered] += 1
        if num_tokens > 1:
            self._gaps[0.0] += num_tokens - 1
        entry.last_delivered = now
        if entry.charge is not None:
            entry.charge(num_tokens, now)
        self._skipped[num_tokens - 1] += 1
