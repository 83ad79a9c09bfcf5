"""The spans of steps, the parents of the shards' own spans."""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanKind,
    StatusCode,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)

from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import (
    Advance,
    CachedBatch,
    GrammarResult,
    Shards,
    StepResult,
)
from text_generation_router.tracing.requests import SequenceTrace, TracedRequests

# A step has a span if it is the first of a sequence's phase, or if the last span of a step began
# longer ago than this: the number of spans grows with the seconds of a request, not its tokens.
EVERY_S = 1.0
# Sequences that the span of a step links to.
MOST_LINKS = 16
_SERVICE = "text_generation.v1.TextGenerationService"


class TraceableShards(Shards, Protocol):
    """`Shards` whose steps take the parent of their spans (a `traceparent`)."""

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
        trace_context: str = "",
    ) -> StepResult:
        """See `Shards.prefill`."""
        ...

    async def decode(
        self, batch_ids: Sequence[int], advance: Advance, trace_context: str = ""
    ) -> StepResult:
        """See `Shards.decode`."""
        ...


class TracedShards:
    """`Shards` with spans for some steps. The parent is a sequence that is new to its phase, or
    else the oldest one; the span has links to the others in the step.

    Owns which of the traced sequences have rows.
    """

    def __init__(self, shards: TraceableShards, requests: TracedRequests) -> None:
        self._shards = shards
        self._requests = requests
        self._batch_id: int | None = None
        # The traced sequences that have rows, oldest first; those in prefill; and those whose phase
        # has no span of a step yet.
        self._rows: dict[int, SequenceTrace] = {}
        self._computing: set[int] = set()
        self._fresh: set[int] = set()
        self._last_span = 0.0

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """See `Shards.prefill`."""
        found = self._requests.sequences
        new = {entry.id: found[entry.id] for entry in entries if entry.id in found}
        for sequence in new.values():
            sequence.enter()
        self._rows |= new
        self._computing |= {i for i, sequence in new.items() if not sequence.is_decoding}
        self._fresh |= new.keys()
        began, span = time.time_ns(), self._begin("Prefill", advance, new.keys())
        try:
            result = await self._shards.prefill(
                batch_id, entries, cached_batch_id, advance, _traceparent(span)
            )
        except BaseException as error:
            self._forget(new)
            _end(span, error)
            raise
        self._settle("Prefill", began, span, result)
        return result

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """See `Shards.decode`."""
        began, span = time.time_ns(), self._begin("Decode", advance)
        try:
            result = await self._shards.decode(batch_ids, advance, _traceparent(span))
        except BaseException as error:
            _end(span, error)
            raise
        self._settle("Decode", began, span, result)
        return result

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `Shards.filter_batch`."""
        batch = await self._shards.filter_batch(batch_id, request_ids)
        self._forget(self._rows.keys() - set(batch.request_ids))
        return batch

    async def clear_cache(self, batch_id: int | None) -> None:
        """See `Shards.clear_cache`."""
        if batch_id is None or batch_id == self._batch_id:
            self._forget(list(self._rows))
        await self._shards.clear_cache(batch_id)

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """See `Shards.compile_grammar`."""
        return await self._shards.compile_grammar(grammar, timeout_s)

    async def health(self) -> None:
        """See `Shards.health`."""
        await self._shards.health()

    def _begin(
        self, method: str, advance: Advance | None, new_ids: Iterable[int] = ()
    ) -> Span | None:
        """The span of a step that is about to be sent; None: it gets none."""
        is_time = time.monotonic() - self._last_span > EVERY_S
        if not (self._rows and (self._fresh or is_time)):
            return None
        computing = {*new_ids, *(i for i, _ in (advance.chunks if advance is not None else ()))}
        inside = [i for i, s in self._rows.items() if s.is_decoding or i in computing]
        if not is_time and self._fresh.isdisjoint(inside):
            return None
        return self._span(method, time.time_ns(), inside)

    def _span(self, method: str, began: int, inside: Sequence[int]) -> Span | None:
        """The span of a step; None: all sequences in it have ended."""
        fresh = [i for i in inside if i in self._fresh]
        old = [i for i in inside if i not in self._fresh]
        contexts = [c for i in (*fresh, *old) if (c := self._rows[i].context) is not None]
        if not contexts:
            return None
        parent = NonRecordingSpan(contexts[0])
        span = self._requests.tracer.start_span(
            f"{_SERVICE}/{method}",
            set_span_in_context(parent, Context()),
            SpanKind.CLIENT,
            {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method},
            [Link(context) for context in contexts[1 : MOST_LINKS + 1]],
            began,
        )
        context = span.get_span_context()
        for i in inside:
            self._rows[i].note_step(context)
        self._fresh.difference_update(inside)
        self._last_span = time.monotonic()
        return span

    def _settle(self, method: str, began: int, span: Span | None, result: StepResult) -> None:
        """A step has succeeded."""
        self._batch_id = None if result.batch is None else result.batch.id
        if not self._rows:
            _end(span)
            return
        ended = result.ended & self._rows.keys()
        if ended and span is None:
            # Only its result shows that a step is a sequence's last: the shards have no spans then.
            span = self._span(method, began, sorted(ended))
        for i in self._computing & set(result.request_ids):
            self._computing.remove(i)
            self._rows[i].finish_prefill(goes_on=i not in ended)
            self._fresh.add(i)
        self._forget(ended)
        if span is not None:
            span.set_attributes(
                {
                    "batch_size": len(result.request_ids),
                    "forward_ns": result.forward_ns,
                    "decode_ns": result.decode_ns,
                }
            )
        _end(span)

    def _forget(self, entry_ids: Iterable[int]) -> None:
        for i in entry_ids:
            self._rows.pop(i, None)
            self._computing.discard(i)
            self._fresh.discard(i)


def _traceparent(span: Span | None) -> str:
    """The span as the header `traceparent`; empty: no span."""
    if span is None:
        return ""
    context = span.get_span_context()
    trace_id, span_id = format_trace_id(context.trace_id), format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"


def _end(span: Span | None, error: BaseException | None = None) -> None:
    if span is None:
        return
    if error is not None:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", type(error).__name__)
    span.end()
