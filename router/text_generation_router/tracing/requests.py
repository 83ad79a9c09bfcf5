"""The spans of requests and steps: one for each POST, and below it `validation`, `queue`, `prefill`
and `decode`; and of some steps, the parents of the shards' own spans.

The request's span lasts from its first byte to its last. The others are made when a sequence has
ended, from clock readings that the scheduler takes in any case.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from text_generation_process.tracing import SERVICE, end_span, mark_failed, traceparent

from text_generation_router.request import Ending
from text_generation_router.request_options import TRACE, current
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.step import Plan, StepResult

# Sequences of a request that have spans; all others only count in its usage.
MOST_SEQUENCES = 16
# A step has a span if it is the first of a sequence's phase, or if the last span of a step began
# longer ago than this: the number of spans grows with the seconds of a request, not its tokens.
EVERY_S = 1.0
# Requests that the span of a step links to.
MOST_LINKS = 16
_CHAT = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class TracedRequests:
    """Owns the traces of the requests in flight; makes spans for some steps. `sequences` has the
    sequences that the scheduler holds, by entry id. Used only from the event loop.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self.tracer = tracer
        self.model = model
        self.sequences: dict[int, SequenceTrace] = {}
        # When the span of a step began last.
        self._last_span = 0.0

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

    # ---- Steps ----

    def begin_step(self, plan: Plan) -> tuple[str, Callable[[asyncio.Future[StepResult]], None]]:
        """The context of the span of a step, and what ends the span; see `recovery.Trace`.

        The parent is the request of a sequence that is new to its phase, or else the oldest one;
        the span has links to the others in the step.
        """
        found = self.sequences
        for entry in plan.admitted:
            if entry.id in found:
                found[entry.id].is_fresh = True
        rows = {i: found[i] for i in plan.entries if i in found}
        inside = [row for i, row in rows.items() if row.prefilled or i in plan.chunks]
        method, began = "Prefill" if plan.admitted else "Decode", time.time_ns()
        is_time = time.monotonic() - self._last_span > EVERY_S
        has_span = is_time or any(sequence.is_fresh for sequence in inside)
        span = self._step_span(method, began, inside) if has_span else None
        return traceparent(span), partial(self._end_step, span, method, began, rows)

    def _end_step(
        self,
        span: Span | None,
        method: str,
        began: int,
        rows: Mapping[int, "SequenceTrace"],
        step: asyncio.Future[StepResult],
    ) -> None:
        """Ends the span of a step that is done. `rows`: its sequences that are traced."""
        error = asyncio.CancelledError() if step.cancelled() else step.exception()
        if error is not None:
            end_span(span, error)
            return
        result = step.result()
        if span is None and (last := result.ended & rows.keys()):
            # Only its result shows that a step is a sequence's last: the shards have no spans.
            span = self._step_span(method, began, [rows[i] for i in sorted(last)])
        for i in rows.keys() & set(result.request_ids):
            if not rows[i].prefilled:
                rows[i].prefilled, rows[i].is_fresh = time.perf_counter(), True
        if span is not None:
            span.set_attribute("batch_size", len(result.request_ids))
            span.set_attribute("forward_ns", result.forward_ns)
            span.set_attribute("decode_ns", result.decode_ns)
        end_span(span)

    def _step_span(self, method: str, began: int, inside: Sequence["SequenceTrace"]) -> Span | None:
        """The span of a step; None: no sequence in it is traced."""
        fresh_first = sorted(inside, key=lambda sequence: not sequence.is_fresh)
        requests = list(dict.fromkeys(sequence.request for sequence in fresh_first))
        if not requests:
            return None
        span = self.tracer.start_span(
            f"{SERVICE}/{method}",
            requests[0].context,
            SpanKind.CLIENT,
            {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method},
            [request.link for request in requests[1 : MOST_LINKS + 1]],
            began,
        )
        for sequence in inside:
            sequence.note_step(span.get_span_context())
        self._last_span = time.monotonic()
        return span


class RequestTrace:
    """Owns the span of one HTTP request and collects its attributes until it ends."""

    def __init__(self, requests: TracedRequests, span: Span) -> None:
        self._requests = requests
        self._span = span
        self.context = set_span_in_context(span, Context())
        """With its span, for spans below."""
        # From `time.perf_counter()`, the scheduler's clock, to the time of spans.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._status = 0
        self._error_type = ""
        self._attributes: dict[str, Any] = {}
        self._num_sequences = self._input_tokens = self._output_tokens = 0
        self._finish_reasons: list[str] = []

    @property
    def link(self) -> Link:
        """To its span."""
        return Link(self._span.get_span_context())

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

    def span(self, name: str, began: float, steps: Sequence[SpanContext] = ()) -> Span:
        """A child span of the request's, from a reading of `time.perf_counter()`, with links."""
        links = [Link(step) for step in steps]
        return self._requests.tracer.start_span(
            name, self.context, links=links, start_time=self.ns(began)
        )

    def ns(self, reading: float) -> int:
        """A reading of `time.perf_counter()` as the time of a span."""
        return self._epoch_ns + int(reading * 1e9)

    def follow(self, entries: Sequence[Entry]) -> None:
        """Traces the sequences of one prompt, just submitted."""
        first, sequences = entries[0], self._requests.sequences
        if not self._num_sequences:
            # No text of the request leaves the server.
            sampling = first.request.sampling
            self._attributes |= {
                "gen_ai.request.max_tokens": first.request.max_new_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                **({"gen_ai.request.top_k": sampling.top_k} if sampling.top_k else {}),
            }
        if self._num_sequences < MOST_SEQUENCES:
            self.span("validation", first.arrival).end(self.ns(first.queued))
        for entry in entries[: max(0, MOST_SEQUENCES - self._num_sequences)]:
            sequences[entry.id] = SequenceTrace(self, entry)
        self._num_sequences += len(entries)
        self._input_tokens += first.prompt_tokens

    def end(self, entry: Entry, error_type: str) -> None:
        """A sequence has ended; `error_type` says why if it has no ending and no error."""
        now, ending = time.perf_counter(), entry.ending
        if entry.error is not None:
            error_type = entry.error.error_type
        if ending is None:
            self.fail(error_type)
        if not entry.is_prompt_only:
            self._output_tokens += len(entry.token_ids)
            if ending is not None:
                self._finish_reasons.append(ending.generated.finish_reason.value)
        sequence = self._requests.sequences.pop(entry.id, None)
        if sequence is None:
            return
        sequence.end(now, "" if ending is not None else error_type)
        if ending is not None and "total_time" not in self._attributes:
            self._attributes |= sequence.durations(now, ending)

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
    """One sequence of a request. Its phases become spans when it has ended: `queue`, `prefill` and
    `decode`, the last two with links to the first and the last step in it that has a span."""

    def __init__(self, request: RequestTrace, entry: Entry) -> None:
        self.request = request
        self.prefilled = 0.0
        """When its prompt was computed; 0 before."""
        self.is_fresh = True
        """Whether no step in its phase, or since it was preempted, has a span yet."""
        self._entry = entry
        # Of the prefill, and of the decode.
        self._steps: tuple[list[SpanContext], list[SpanContext]] = ([], [])

    def note_step(self, step: SpanContext) -> None:
        """The sequence takes part in a step that has a span."""
        steps = self._steps[self.prefilled > 0]
        steps[:] = [*steps[:1], step]
        self.is_fresh = False

    def end(self, now: float, error_type: str) -> None:
        """The sequence has ended, with an error unless `error_type` is empty."""
        request, entry, (before, behind) = self.request, self._entry, self._steps
        started, prefilled = entry.started, self.prefilled
        spans = [(request.span("queue", entry.queued), started or now)]
        if started is not None:
            span = request.span("prefill", started, before)
            span.set_attribute("gen_ai.usage.input_tokens", entry.prompt_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", entry.cached_tokens)
            spans.append((span, prefilled or now))
        if prefilled and (error_type or len(entry.token_ids) > 1):
            span = request.span("decode", prefilled, behind)
            span.set_attribute("gen_ai.usage.output_tokens", len(entry.token_ids))
            spans.append((span, now))
        mark_failed(spans[-1][0], error_type)
        for span, ended in spans:
            span.end(request.ns(ended))

    def durations(self, now: float, ending: Ending) -> dict[str, Any]:
        """The durations: with TGI's names, as text, and with vLLM's, in seconds."""
        started = self._entry.started
        assert started is not None, "it has generated something"
        return {
            **{name: f"{seconds:.6f}s" for name, seconds in ending.times.items()},
            "seed": str(ending.generated.seed),
            "gen_ai.latency.e2e": ending.times["total_time"],
            "gen_ai.latency.time_to_first_token": self.prefilled - self._entry.arrival,
            "gen_ai.latency.time_in_queue": ending.times["queue_time"],
            "gen_ai.latency.time_in_model_prefill": self.prefilled - started,
            "gen_ai.latency.time_in_model_decode": now - self.prefilled,
            "gen_ai.latency.time_in_model_inference": ending.times["inference_time"],
        }
