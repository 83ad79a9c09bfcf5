"""One request, from its permits to the end of its generations."""

import asyncio
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
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    KeyLimitError,
    OverloadedError,
    QueueWaitError,
    RouterError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.request import Ending, GenerateResult, PromptResult, sequences_of
from text_generation_router.request_options import NO_OPTIONS, Deadline, RequestOptions
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.costs import EndingRate
from text_generation_router.scheduler.entry import Entry
from text_generation_router.validation import (
    GenerateParameters,
    Validation,
    check_first,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Asking = Callable[[], Awaitable[GenerateParameters]]
# How long the head of a stream with a time limit is held back, so that a refusal can have a status.
# Proxies close connections that are silent for longer.
MOST_HELD_S = 15.0
# Prompts of one request that are read and not continued; OpenAI's limit.
MOST_PROMPTS = 2048
# From admission to the first token.
_PREFILL_S = 1.0


class Permits:
    """Owns the permits and the rate at which they are returned."""

    def __init__(self, num: int) -> None:
        self._num = self.num_free = num
        self._rate = EndingRate()

    def check_could_fit(self, num: int) -> None:
        """Raises OverloadedError if `num` permits do not exist."""
        if num > self._num:
            raise OverloadedError(self._rate.retry_after_s(time.perf_counter(), num))

    @contextmanager
    def taken(self, num: int) -> Iterator[None]:
        """Takes all of `num` permits, or none. Raises OverloadedError with a `retry-after`."""
        now = time.perf_counter()
        if self.num_free < num:
            raise OverloadedError(self._rate.retry_after_s(now, num - self.num_free))
        if self.num_free == self._num:
            self._rate.begin(now)
        self.num_free -= num
        try:
            yield
        finally:
            self.num_free += num
            self._rate.end(time.perf_counter(), num)


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
        self._max_queue_wait_s = max_queue_wait_s

    @property
    def free_permits(self) -> int:
        """How many more generations could start now."""
        return self._permits.num_free

    def check_could_fit(self, num: int, options: RequestOptions) -> None:
        """Raises OverloadedError if `num` generations can never run at once, and ValidationError if
        the caller may never run as many."""
        if (allowance := options.caller.allowance) is not None:
            allowance.check_could_fit(num)
        self._permits.check_could_fit(num)

    @asynccontextmanager
    async def start_many(
        self,
        asked: GenerateParameters | Asking,
        num_sequences: int,
        options: RequestOptions = NO_OPTIONS,
        is_stream: bool = False,
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
            if isinstance(asked, GenerateParameters):
                check_first(asked, self._validation.limits, is_stream)
            with self.admitted(num_sequences, options):
                if not isinstance(asked, GenerateParameters):
                    asked = await asked()
                request = await self._validation.validate(asked)
                caller, deadline = options.caller, options.deadline
                requests = sequences_of(request, num_sequences, caller.salt, options.priority)
                charge = None if caller.allowance is None else caller.allowance.take
                entries = self._batcher.submit_many(requests, arrival, charge)
                if options.trace is not None:
                    options.trace.follow(entries)
                if charge is not None:
                    charge(len(request.input_ids), time.perf_counter())
                try:
                    async with time_limited(
                        self._batcher, entries, deadline, self._max_queue_wait_s
                    ):
                        yield entries
                finally:
                    for entry in entries:
                        self._batcher.cancel(entry)
        except BaseException as error:
            self._count(entries, options, error)
            raise
        self._count(entries, options)

    async def generate_many(
        self,
        asked: GenerateParameters | Asking,
        num_sequences: int,
        options: RequestOptions = NO_OPTIONS,
        check_prompt: Callable[[int], None] | None = None,
    ) -> list[GenerateResult]:
        """Whole generations of one prompt; one failure fails all. `check_prompt` is called with
        the number of prompt tokens, and may raise RouterError."""
        async with self.start_many(asked, num_sequences, options) as entries:
            if check_prompt is not None:
                check_prompt(entries[0].prompt_tokens)
            results = await gather_or_cancel(entry.collect() for entry in entries)
        # All have the same prompt, and so the same log-probabilities of it.
        return [replace(result, prefill=results[0].prefill) for result in results]

    async def read_prompts(
        self, asked: Sequence[GenerateParameters | Asking], options: RequestOptions = NO_OPTIONS
    ) -> list[PromptResult]:
        """The results of prompts that are read and not continued, in order; the first failure
        cancels the rest.

        Until the last is done it holds as many permits as prompts run at once: at most half of the
        free ones, and no more than the caller has left. Raises RouterError.
        """
        began = time.perf_counter()
        results: dict[int, PromptResult] = {}
        waiting = iter(enumerate(asked))
        num_at_once = max(1, min(len(asked), self.free_permits // 2))
        if (allowance := options.caller.allowance) is not None:
            num_at_once = min(num_at_once, allowance.num_free or num_at_once)
        inside = replace(options, is_admitted=True)

        async def read() -> None:
            for place, one in waiting:
                [made] = await self.generate_many(one, 1, inside)
                results[place] = PromptResult(made.prompt_tokens, made.prefill, made.ending)

        with ExitStack() as stack:
            try:
                stack.enter_context(self.admitted(num_at_once, options))
            except RouterError as error:
                self._count((), options, error)
                raise
            await gather_or_cancel(read() for _ in range(num_at_once))
        logger.info(
            "Success prompts=%d prompt_tokens=%d total_time=%.6fs",
            len(asked),
            sum(result.prompt_tokens for result in results.values()),
            time.perf_counter() - began,
        )
        return [results[place] for place in range(len(asked))]

    async def generate_best_of(
        self, asked: GenerateParameters, options: RequestOptions = NO_OPTIONS
    ) -> tuple[GenerateResult, list[GenerateResult]]:
        """Runs `best_of` generations (default 1) with different seeds: the best, and the rest.

        The best has the highest mean log-probability, the first of equals. One failure fails all.
        """
        best_of = 1 if asked.best_of is None else asked.best_of
        results = await self.generate_many(asked, best_of, options)
        winner = max(range(best_of), key=lambda index: results[index].mean_logprob)
        return results.pop(winner), results

    @contextmanager
    def admitted(self, num: int, options: RequestOptions = NO_OPTIONS) -> Iterator[None]:
        """Takes permits of the caller and the server. Raises KeyLimitError, OverloadedError."""
        if options.is_admitted:
            yield
            return
        with ExitStack() as stack:
            if (allowance := options.caller.allowance) is not None:
                allowance.enter(num, time.perf_counter())
                stack.callback(allowance.leave, num)
            stack.enter_context(self._permits.taken(num))
            yield

    def _count(
        self, entries: Sequence[Entry], options: RequestOptions, error: BaseException | None = None
    ) -> None:
        """Counts, logs and traces how each entry has ended; without entries, that the request never
        started. `error` is what ended the request; entries that had not ended then have its label.
        """
        metrics, trace = self._metrics, options.trace
        label = error_type = "dropped"
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            deadline = options.deadline
            error = deadline.error() if deadline is not None and deadline.is_over else None
        if error is not None:
            # Of a bug the caller logs the traceback.
            kind = error if isinstance(error, RouterError) else RouterError
            label, error_type = kind.metric_label, kind.error_type
        if isinstance(error, KeyLimitError):
            metrics.request_key_limit.inc(reason=error.reason)
        if isinstance(error, RouterError) and all(error is not entry.error for entry in entries):
            _log_failure(error)
        for entry in entries:
            if trace is not None:
                trace.end(entry, error_type)
            if entry.ending is not None:
                self._count_success(entry.ending, is_logged=not options.is_admitted)
            elif entry.error is not None:
                _log_failure(entry.error)
                metrics.request_failure.inc(err=entry.error.metric_label)
            else:
                metrics.request_failure.inc(err=label)
        if not entries:
            metrics.request_failure.inc(err=label)
            if trace is not None:
                trace.fail(error_type)

    def _count_success(self, ending: Ending, is_logged: bool) -> None:
        metrics, times = self._metrics, ending.times
        metrics.request_success.inc()
        metrics.request_duration.observe(times["total_time"])
        metrics.request_validation_duration.observe(times["validation_time"])
        metrics.request_queue_duration.observe(times["queue_time"])
        metrics.request_inference_duration.observe(times["inference_time"])
        metrics.request_mean_time_per_token_duration.observe(times["time_per_token"])
        metrics.request_generated_tokens.observe(ending.generated.generated_tokens)
        if is_logged:
            words = " ".join(f"{name}={seconds:.6f}s" for name, seconds in times.items())
            logger.info("Success %s seed=%s", words, ending.generated.seed)


@asynccontextmanager
async def time_limited(
    batcher: Batcher,
    entries: Sequence[Entry],
    deadline: Deadline | None,
    max_queue_wait_s: float | None,
) -> AsyncIterator[None]:
    """In the block, these entries of one prompt are ended when they exceed their time.

    If time is limited, waits first until there is an output, so that a refusal comes before the
    head of the answer, but at most MOST_HELD_S or the queue wait. Raises the error of an entry.
    """

    def refuse(seconds: float) -> None:
        # If one was admitted, their request has begun, and the others may be waiting for that one.
        if all(entry.started is None for entry in entries):
            end(QueueWaitError(seconds, batcher.queue_retry_s()))

    def end(error: RouterError) -> None:
        for entry in entries:
            batcher.cancel(entry, error)

    loop, most_s = asyncio.get_running_loop(), MOST_HELD_S
    timers: list[asyncio.TimerHandle] = []
    if deadline is not None:
        timers.append(loop.call_at(deadline.at, end, deadline.error()))
    if max_queue_wait_s is not None:
        timers.append(loop.call_later(max_queue_wait_s, refuse, max_queue_wait_s))
        most_s = max(most_s, max_queue_wait_s + _PREFILL_S)
    try:
        if timers:
            with suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await entries[0].ready()
        yield
    finally:
        for timer in timers:
            timer.cancel()


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
