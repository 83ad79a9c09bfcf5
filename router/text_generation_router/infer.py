"""One request, from its permits to the end of its generations."""

import asyncio
import copy
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import (
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from text_generation_router.callers import ANYBODY, Caller, Permits
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    KeyLimitError,
    QueueWaitError,
    RouterError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.request import Ending, GenerateResult, sequences_of
from text_generation_router.request_options import NO_OPTIONS, Deadline, RequestOptions
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.entry import Entry
from text_generation_router.validation import (
    GenerateParameters,
    Validation,
    check_best_of,
    check_stream,
)

if TYPE_CHECKING:
    from text_generation_router.tracing.requests import RequestTrace

logger = logging.getLogger(__name__)

T = TypeVar("T")
Asking = Callable[[], Awaitable[GenerateParameters]]
# How long the head of a stream with a time limit is held back, so that a refusal can have a status.
# Proxies close connections that are silent for longer.
MOST_HELD_S = 15.0
# From admission to the first token.
_PREFILL_S = 1.0


class Infer:
    """Runs at most `max_concurrent_requests` generations at once, of all callers together."""

    def __init__(
        self,
        batcher: Batcher,
        validation: Validation,
        metrics: Metrics,
        max_concurrent_requests: int,
        max_queue_wait_s: float | None = None,
    ) -> None:
        self._batcher = batcher
        self._validation = validation
        self._metrics = metrics
        self._permits = Permits(max_concurrent_requests)
        self._time_limits = TimeLimits(batcher, max_queue_wait_s)
        self._caller = ANYBODY
        self._options = NO_OPTIONS
        self._is_admitted = False
        self._trace: RequestTrace | None = None

    def on_behalf_of(
        self, caller: Caller, request_options: RequestOptions, trace: "RequestTrace | None" = None
    ) -> "Infer":
        """The same for one request of a caller: with its cache salt and limits, and this trace."""
        other = copy.copy(self)
        other._caller, other._options, other._trace = caller, request_options, trace
        return other

    @contextmanager
    def holding_permits(self, num: int) -> Iterator["Infer"]:
        """Takes `num` permits at once; generations in the block need none, and log no success. A
        refusal counts as one failure. Raises KeyLimitError, OverloadedError."""
        other = copy.copy(self)
        other._is_admitted = True
        with ExitStack() as stack:
            try:
                stack.enter_context(self.admitted(num))
            except RouterError as error:
                self._note_failure(error)
                raise
            yield other

    def num_at_once(self, wanted: int) -> int:
        """How many of the `wanted` prompts of one request run at once: at least one, at most half
        of the free permits, and no more than the caller has left."""
        most = max(1, min(wanted, self.free_permits // 2))
        allowance = self._caller.allowance
        return most if allowance is None else min(most, allowance.num_free or most)

    @property
    def free_permits(self) -> int:
        """How many more generations could start now."""
        return self._permits.num_free

    def check_could_fit(self, num: int) -> None:
        """Raises OverloadedError if `num` generations can never run at once, and ValidationError if
        the caller may never run as many."""
        if self._caller.allowance is not None:
            self._caller.allowance.check_could_fit(num)
        self._permits.check_could_fit(num)

    @asynccontextmanager
    async def start_many(
        self, asked: GenerateParameters | Asking, num_sequences: int, is_stream: bool = False
    ) -> AsyncIterator[list[Entry]]:
        """Takes permits (one per sequence, all or none), validates and submits: several generations
        of one prompt, which is computed once. Sequence i has the seed + i; only the first has
        prompt log-probabilities. A callable `asked` is called once the permits are taken.

        Leaving the block cancels running generations. A failure is raised where its generation is
        iterated. Each generation counts as exactly one of success, failure and dropped; a request
        that never started counts as one failure. Raises RouterError.
        """
        arrival = time.perf_counter()
        entries: list[Entry] = []
        try:
            if is_stream and isinstance(asked, GenerateParameters):
                check_stream(asked)
            with self.admitted(num_sequences):
                if not isinstance(asked, GenerateParameters):
                    asked = await asked()
                request = await self._validation.validate(asked)
                salt, priority = self._caller.salt, self._options.priority
                requests = sequences_of(request, num_sequences, salt, priority)
                allowance = self._caller.allowance
                charge = None if allowance is None else allowance.take
                entries = self._batcher.submit_many(requests, arrival, charge)
                if self._trace is not None:
                    self._trace.follow(entries, arrival)
                if charge is not None:
                    charge(len(request.input_ids), time.perf_counter())
                deadline = self._options.deadline
                try:
                    with self._time_limits.over(entries, deadline):
                        await self._time_limits.begun(entries[0], deadline)
                        yield entries
                finally:
                    for entry in entries:
                        self._batcher.cancel(entry)
        except BaseException as error:
            self._note_failure(error, entries)
            raise
        self._count(entries, "dropped")

    async def generate_many(
        self,
        asked: GenerateParameters | Asking,
        num_sequences: int,
        check_prompt: Callable[[int], None] | None = None,
    ) -> list[GenerateResult]:
        """Whole generations of one prompt; one failure fails all. `check_prompt` is called with
        the number of prompt tokens, and may raise RouterError."""
        async with self.start_many(asked, num_sequences) as entries:
            if check_prompt is not None:
                check_prompt(entries[0].prompt_tokens)
            results = await gather_or_cancel(entry.collect() for entry in entries)
        # All have the same prompt, and so the same log-probabilities of it.
        return [replace(result, prefill=results[0].prefill) for result in results]

    async def generate_best_of(
        self, asked: GenerateParameters
    ) -> tuple[GenerateResult, list[GenerateResult]]:
        """Runs `best_of` generations (default 1) with different seeds: the best, and the rest.

        The best has the highest mean log-probability, the first of equals. One failure fails all.
        """
        best_of = 1 if asked.best_of is None else asked.best_of
        if best_of != 1:
            try:
                check_best_of(best_of, self._validation.limits)
            except RouterError as error:
                self._note_failure(error)
                raise
        results = await self.generate_many(asked, best_of)
        winner = max(range(best_of), key=lambda index: results[index].mean_logprob)
        return results.pop(winner), results

    @contextmanager
    def admitted(self, num: int) -> Iterator[None]:
        """Takes permits of the caller and the server. Raises KeyLimitError, OverloadedError."""
        if self._is_admitted:
            yield
            return
        with ExitStack() as stack:
            if (allowance := self._caller.allowance) is not None:
                allowance.enter(num, time.perf_counter())
                stack.callback(allowance.leave, num)
            stack.enter_context(self._permits.taken(num))
            yield

    def _note_failure(self, error: BaseException, entries: Sequence[Entry] = ()) -> None:
        """Counts and logs the failure of a request; without entries it never started."""
        deadline = self._options.deadline
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            if deadline is None or not deadline.is_over:
                self._count(entries, "dropped")
                return
            error = deadline.error()
        if isinstance(error, KeyLimitError):
            self._metrics.request_key_limit.inc(reason=error.reason)
        # Of a bug the caller logs the traceback.
        kind = error if isinstance(error, RouterError) else RouterError
        if isinstance(error, RouterError) and all(error is not entry.error for entry in entries):
            _log_failure(error)
        self._count(entries, kind.metric_label, kind.error_type)

    def _count(self, entries: Sequence[Entry], otherwise: str, error_type: str = "") -> None:
        """Counts how each entry ended. `otherwise` labels entries without an ending, or
        the request if there are none. Its span gets `error_type`, or else the same label."""
        trace = self._trace
        if trace is not None and not entries:
            trace.fail(error_type or otherwise)
        for entry in entries:
            if trace is not None:
                trace.end(entry, error_type or otherwise)
            if entry.ending is not None:
                self._count_success(entry.ending)
            elif entry.error is not None:
                _log_failure(entry.error)
                self._metrics.request_failure.inc(err=entry.error.metric_label)
            else:
                self._metrics.request_failure.inc(err=otherwise)
        if not entries:
            self._metrics.request_failure.inc(err=otherwise)

    def _count_success(self, ending: Ending) -> None:
        metrics = self._metrics
        metrics.request_success.inc()
        metrics.request_duration.observe(ending.total_s)
        metrics.request_validation_duration.observe(ending.validation_s)
        metrics.request_queue_duration.observe(ending.queue_s)
        metrics.request_inference_duration.observe(ending.inference_s)
        metrics.request_mean_time_per_token_duration.observe(ending.time_per_token_s)
        metrics.request_generated_tokens.observe(ending.generated.generated_tokens)
        if self._is_admitted:
            return
        logger.info(
            "Success total_time=%.6fs validation_time=%.6fs queue_time=%.6fs "
            "inference_time=%.6fs time_per_token=%.6fs seed=%s",
            ending.total_s,
            ending.validation_s,
            ending.queue_s,
            ending.inference_s,
            ending.time_per_token_s,
            ending.generated.seed,
        )


class TimeLimits:
    """Ends entries that exceed their time."""

    def __init__(self, batcher: Batcher, max_queue_wait_s: float | None = None) -> None:
        self._batcher = batcher
        self._max_queue_wait_s = max_queue_wait_s

    @contextmanager
    def over(self, entries: Sequence[Entry], deadline: Deadline | None) -> Iterator[None]:
        """In the block, the limits apply to these entries of one prompt."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        if deadline is not None:
            timers.append(loop.call_at(deadline.at, self._end, entries, deadline))
        if (seconds := self._max_queue_wait_s) is not None:
            timers.append(loop.call_later(seconds, self._refuse, entries, seconds))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    async def begun(self, entry: Entry, deadline: Deadline | None) -> None:
        """If time is limited, waits until the entry has an output, so that a refusal comes before
        the head of the answer, but at most MOST_HELD_S or the queue wait. Raises the error of the
        entry."""
        if deadline is None and self._max_queue_wait_s is None:
            return
        most_s = MOST_HELD_S
        if self._max_queue_wait_s is not None:
            most_s = max(most_s, self._max_queue_wait_s + _PREFILL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await entry.ready()

    def _end(self, entries: Sequence[Entry], deadline: Deadline) -> None:
        for entry in entries:
            self._batcher.cancel(entry, deadline.error())

    def _refuse(self, entries: Sequence[Entry], seconds: float) -> None:
        """Ends the entries unless one was admitted: then their request has begun, and the others
        may be waiting for that one."""
        if any(entry.started is not None for entry in entries):
            return
        retry_after_s = self._batcher.queue_retry_s()
        for entry in entries:
            self._batcher.cancel(entry, QueueWaitError(seconds, retry_after_s))


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once and returns their results in order. Raises the first failure. No work is
    left running: the rest is cancelled, and has ended when this returns or raises."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(error: RouterError) -> None:
    is_ours = isinstance(error, GenerationError | IncompleteGenerationError)
    logger.log(logging.ERROR if is_ours else logging.WARNING, "%s", error.log_message)
