"""The spans of requests: one for each POST, and below it `validation`, `queue`, `prefill` and
`decode`.

The request's span lasts from its first byte to its last. The others use clock readings that the
scheduler takes in any case.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from text_generation_process.tracing import mark_failed, open_tracer

from text_generation_router.request import GeneratedText
from text_generation_router.request_id import TRACE, current
from text_generation_router.scheduler.entry import Entry

# Sequences of a request that have spans; all others only count in its usage.
MOST_SEQUENCES = 16
_CHAT = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class TracedRequests:
    """Owns the traces of the requests in flight. `sequences` has their sequences that the scheduler
    holds, by entry id. Used only from the event loop.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self.tracer = tracer
        self.model = model
        self.sequences: dict[int, SequenceTrace] = {}

    def begin(self, scope: Scope) -> "RequestTrace | None":
        """The trace of a new request, as a child of its `traceparent`; None: it is not sampled."""
        headers = scope["headers"]
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        parent = TraceContextTextMapPropagator().extract(carrier, Context())
        span = self.tracer.start_span(scope["method"], parent, SpanKind.SERVER)
        return RequestTrace(self, span) if span.is_recording() else None

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application with its POSTs traced; other methods serve monitoring and have no
        trace."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            trace = None
            if scope["type"] == "http" and scope["method"] == "POST":
                trace = self.begin(scope)
            if trace is None:
                await app(scope, receive, send)
                return
            scope[TRACE] = trace
            try:
                await app(scope, receive, trace.watch(send))
            except BaseException as error:
                trace.fail(type(error).__name__)
                raise
            finally:
                # The trace may refer to the scope: this breaks the cycle.
                del scope[TRACE]
                trace.close(scope)

        return traced


@contextmanager
def open_tracing(
    endpoint: str, service_name: str, version: str, model: str
) -> Iterator[TracedRequests]:
    """Sends spans to the collector until the end of the block; see `open_tracer`."""
    with open_tracer(endpoint, service_name, version, {}) as tracer:
        yield TracedRequests(tracer, model)


class RequestTrace:
    """Owns the span of one HTTP request and collects its attributes until it ends."""

    def __init__(self, requests: TracedRequests, span: Span) -> None:
        self._requests = requests
        self._span = span
        self._context = set_span_in_context(span, Context())
        # From `time.perf_counter()`, the scheduler's clock, to the time of spans.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._status = 0
        self._error_type = ""
        self._attributes: dict[str, Any] = {}
        self._num_sequences = self._input_tokens = self._output_tokens = 0
        self._finish_reasons: list[str] = []

    @property
    def trace_id(self) -> str:
        """The id of its trace, in hexadecimal."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def watch(self, send: Send) -> Send:
        """A `send` that records the status."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
            await send(message)

        return watched

    def span(self, name: str, began: float) -> Span:
        """A child span of the request's, from a reading of `time.perf_counter()`."""
        return self._requests.tracer.start_span(name, self._context, start_time=self.ns(began))

    def ns(self, reading: float) -> int:
        """A reading of `time.perf_counter()` as the time of a span."""
        return self._epoch_ns + int(reading * 1e9)

    def follow(self, entries: Sequence[Entry], arrival: float) -> None:
        """Traces the sequences of one prompt, just submitted. `arrival`: when the prompt came."""
        first, sequences = entries[0], self._requests.sequences
        if not self._num_sequences:
            # No text of the request leaves the server.
            sampling = first.request.sampling
            self._attributes |= {
                "gen_ai.request.max_tokens": first.request.stopping.max_new_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                **({"gen_ai.request.top_k": sampling.top_k} if sampling.top_k else {}),
            }
        if self._num_sequences < MOST_SEQUENCES:
            self.span("validation", arrival).end(self.ns(first.queued))
        for entry in entries[: max(0, MOST_SEQUENCES - self._num_sequences)]:
            sequences[entry.id] = SequenceTrace(self, entry, arrival)
        self._num_sequences += len(entries)
        self._input_tokens += len(first.request.input_ids)

    def end(self, entry: Entry, generated: GeneratedText | None, error_type: str) -> None:
        """A sequence has ended; `error_type` says why if `generated` is None."""
        now = time.perf_counter()
        if generated is None:
            self.fail(error_type)
        if not entry.request.is_prompt_only:
            self._output_tokens += len(entry.token_ids)
            if generated is not None:
                self._finish_reasons.append(generated.finish_reason.value)
        sequence = self._requests.sequences.pop(entry.id, None)
        if sequence is None:
            return
        sequence.end(now, "" if generated is not None else error_type)
        if generated is not None and "total_time" not in self._attributes:
            self._attributes |= sequence.durations(now, generated)

    def fail(self, error_type: str) -> None:
        """The request has failed; the last call decides the error type."""
        self._error_type = error_type

    def close(self, scope: Scope) -> None:
        """Ends the span: the request is answered, or its client has disconnected."""
        span, method = self._span, scope["method"]
        attributes = {
            "http.request.method": method,
            "url.scheme": scope["scheme"],
            **self._attributes,
        }
        if scope.get("client"):
            attributes["client.address"] = scope["client"][0]
        if route := getattr(scope.get("route"), "path", ""):
            attributes["http.route"] = route
            span.update_name(f"{method} {route}")
        if (name := current()) is not None:
            attributes["url.path"] = name.route
            attributes["request_id"] = attributes["gen_ai.request.id"] = name.request_id
        if self._num_sequences:
            attributes |= self._usage(route)
        if self._status:
            attributes["http.response.status_code"] = self._status
        error_type = self._error_type or (str(self._status) if self._status >= 400 else "")
        mark_failed(span, error_type)
        span.set_attributes(attributes)
        span.end()

    def _usage(self, route: str) -> dict[str, Any]:
        operation = "chat" if route in _CHAT else "text_completion"
        tokens_in, tokens_out = self._input_tokens, self._output_tokens
        reasons = self._finish_reasons
        return {
            "gen_ai.provider.name": "pytgi",
            "gen_ai.operation.name": "embeddings" if "embeddings" in route else operation,
            "gen_ai.request.model": self._requests.model,
            "gen_ai.response.model": self._requests.model,
            **({"gen_ai.response.finish_reasons": reasons} if reasons else {}),
            "gen_ai.usage.input_tokens": tokens_in,
            "gen_ai.usage.output_tokens": tokens_out,
            # vLLM's names.
            "gen_ai.usage.prompt_tokens": tokens_in,
            "gen_ai.usage.completion_tokens": tokens_out,
            "gen_ai.usage.num_sequences": self._num_sequences,
        }


class SequenceTrace:
    """Owns the spans `queue`, `prefill` and `decode` of one sequence, one after the other. Each has
    links to the first and the last step in it that has a span."""

    def __init__(self, request: RequestTrace, entry: Entry, arrival: float) -> None:
        self._request = request
        self._entry = entry
        self._arrival = arrival
        self.is_decoding = False
        """Whether its prompt is computed."""
        self.is_fresh = True
        """Whether no step in its phase, or since it was preempted, has a span yet."""
        self._has_ended = False
        self._prefilled = 0.0
        self._phase: Span | None = None
        self._steps: list[SpanContext] = []

    @property
    def context(self) -> SpanContext | None:
        """The span of the current phase, between `enter` and its end."""
        return None if self._phase is None else self._phase.get_span_context()

    def enter(self) -> None:
        """A step with its prompt is about to begin, for the first time or after a preemption."""
        entry = self._entry
        self.is_fresh = True
        if self._phase is not None:
            self._phase.add_event("preempted")
            return
        started = entry.started
        assert started is not None, "it was admitted"
        self._request.span("queue", entry.queued).end(self._request.ns(started))
        self._phase = self._request.span("prefill", started)
        cached = entry.num_cached_tokens
        self._phase.set_attribute("gen_ai.usage.input_tokens", len(entry.request.input_ids))
        self._phase.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)

    def note_step(self, step: SpanContext) -> None:
        """The sequence takes part in a step that has a span."""
        self._steps = [*self._steps[:1], step]
        self.is_fresh = False

    def finish_prefill(self, goes_on: bool) -> None:
        """The first token is computed; `goes_on`: more tokens follow."""
        if self._has_ended:
            return
        now = self._prefilled = time.perf_counter()
        self.is_decoding = self.is_fresh = True
        self._end_phase(now)
        if goes_on:
            self._phase = self._request.span("decode", now)

    def end(self, now: float, error_type: str) -> None:
        """The sequence has ended, with an error unless `error_type` is empty."""
        self._has_ended = True
        if self._phase is None and self._entry.started is None:
            self._phase = self._request.span("queue", self._entry.queued)
        if self._phase is None:
            return
        if self.is_decoding:
            self._phase.set_attribute("gen_ai.usage.output_tokens", len(self._entry.token_ids))
        mark_failed(self._phase, error_type)
        self._end_phase(now)

    def durations(self, now: float, generated: GeneratedText) -> dict[str, Any]:
        """The durations: with TGI's names, as text, and with vLLM's, in seconds."""
        entry = self._entry
        queued, started = entry.queued, entry.started
        assert started is not None, "it has generated something"
        inference_s = now - started
        words = {
            "total_time": now - self._arrival,
            "validation_time": queued - self._arrival,
            "queue_time": started - queued,
            "inference_time": inference_s,
            "time_per_token": inference_s / max(1, generated.generated_tokens),
        }
        return {
            **{name: f"{seconds:.6f}s" for name, seconds in words.items()},
            "seed": str(generated.seed),
            "gen_ai.latency.e2e": words["total_time"],
            "gen_ai.latency.time_to_first_token": self._prefilled - self._arrival,
            "gen_ai.latency.time_in_queue": words["queue_time"],
            "gen_ai.latency.time_in_model_prefill": self._prefilled - started,
            "gen_ai.latency.time_in_model_decode": now - self._prefilled,
            "gen_ai.latency.time_in_model_inference": inference_s,
        }

    def _end_phase(self, now: float) -> None:
        if self._phase is None:
            return
        for step in self._steps:
            self._phase.add_link(step)
        self._phase.end(self._request.ns(now))
        self._phase, self._steps = None, []
