"""One user's generation from its permit to its ending."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    RouterError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.request import (
    GeneratedText,
    Output,
    PrefillOutput,
    Timings,
    Token,
    TokenOutput,
)
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.entry import Entry
from text_generation_router.validation import (
    GenerateParameters,
    Validation,
    check_best_of,
    check_stream,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durations:
    """Where the time of one finished generation went, in seconds."""

    total_s: float
    validation_s: float
    queue_s: float
    inference_s: float
    time_per_token_s: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended well."""

    generated: GeneratedText
    durations: Durations


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole generation; `top_tokens` has one entry per token, or none at all."""

    prompt_tokens: int
    prefill: tuple[Token, ...]
    tokens: tuple[Token, ...]
    top_tokens: tuple[tuple[Token, ...], ...]
    ending: Ending

    @property
    def mean_logprob(self) -> float:
        """Mean over the generated tokens; -inf where it is not defined, so that it never wins."""
        total = sum(math.nan if t.logprob is None else t.logprob for t in self.tokens)
        mean = total / len(self.tokens)
        return -math.inf if math.isnan(mean) else mean


class Generation:
    """A running generation: iterate it for lists of outputs that became ready together.

    `ending` is set once the last list was handed out; a failure is raised as RouterError.
    """

    def __init__(self, entry: Entry, prompt_tokens: int, arrival: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.ending: Ending | None = None
        self._entry = entry
        self._arrival = arrival

    def __aiter__(self) -> AsyncIterator[list[Output]]:
        return self

    async def __anext__(self) -> list[Output]:
        if self.ending is not None:
            raise StopAsyncIteration
        outputs = await self._entry.next_outputs()
        last = outputs[-1]
        if isinstance(last, TokenOutput) and last.generated is not None:
            assert last.timings is not None
            self.ending = Ending(last.generated, self._durations(last.generated, last.timings))
        return outputs

    def _durations(self, generated: GeneratedText, timings: Timings) -> Durations:
        now = time.perf_counter()
        inference_s = now - timings.started
        return Durations(
            total_s=now - self._arrival,
            validation_s=timings.queued - self._arrival,
            queue_s=timings.started - timings.queued,
            inference_s=inference_s,
            time_per_token_s=inference_s / max(1, generated.generated_tokens),
        )


class Infer:
    """Owns the permits: at most `max_concurrent_requests` generations are in the house."""

    def __init__(
        self,
        batcher: Batcher,
        validation: Validation,
        metrics: Metrics,
        max_concurrent_requests: int,
    ) -> None:
        self._batcher = batcher
        self._validation = validation
        self._metrics = metrics
        self._free_permits = max_concurrent_requests

    @property
    def free_permits(self) -> int:
        """How many more generations would be let in now."""
        return self._free_permits

    @asynccontextmanager
    async def start(
        self, asked: GenerateParameters, is_stream: bool = False
    ) -> AsyncIterator[Generation]:
        """Permit, validation, submission. Leaving the block early cancels the generation.

        Exactly one of success, failure and dropped is counted. Raises RouterError.
        """
        arrival = time.perf_counter()
        try:
            if is_stream:
                check_stream(asked)
            with self._permit():
                request = await self._validation.validate(asked)
                entry = self._batcher.submit(request)
                generation = Generation(entry, len(request.input_ids), arrival)
                try:
                    yield generation
                finally:
                    if generation.ending is None:
                        self._batcher.cancel(entry)
                    else:
                        self._count_success(generation.ending)
        except RouterError as error:
            self._count_failure(error)
            raise
        except Exception:  # a bug; whoever answers the client reports it
            self._metrics.request_failure.inc(err=RouterError.metric_label)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.request_failure.inc(err="dropped")
            raise

    async def generate(self, asked: GenerateParameters) -> GenerateResult:
        """One whole generation."""
        prefill: tuple[Token, ...] = ()
        tokens: list[Token] = []
        top_tokens: list[tuple[Token, ...]] = []
        async with self.start(asked) as generation:
            async for outputs in generation:
                for output in outputs:
                    if isinstance(output, PrefillOutput):
                        prefill = output.tokens
                        continue
                    tokens.append(output.token)
                    if asked.top_n_tokens:
                        top_tokens.append(output.top_tokens)
        assert generation.ending is not None
        return GenerateResult(
            generation.prompt_tokens, prefill, tuple(tokens), tuple(top_tokens), generation.ending
        )

    async def generate_best_of(
        self, asked: GenerateParameters
    ) -> tuple[GenerateResult, list[GenerateResult]]:
        """`best_of` generations (1 when not given) with seeds of their own: the best, the others.

        The best has the highest mean log-probability, the first of equals. One failure fails all.
        """
        best_of = 1 if asked.best_of is None else asked.best_of
        if best_of == 1:
            return await self.generate(asked), []
        try:
            check_best_of(best_of, self._validation.limits)
        except RouterError as error:
            self._count_failure(error)
            raise
        tasks = [asyncio.create_task(self.generate(asked)) for _ in range(best_of)]
        try:
            results = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        winner = max(range(best_of), key=lambda index: results[index].mean_logprob)
        return results.pop(winner), results

    @contextmanager
    def _permit(self) -> Iterator[None]:
        if self._free_permits <= 0:
            raise OverloadedError
        self._free_permits -= 1
        try:
            yield
        finally:
            self._free_permits += 1

    def _count_failure(self, error: RouterError) -> None:
        self._metrics.request_failure.inc(err=error.metric_label)
        is_ours = isinstance(error, GenerationError | IncompleteGenerationError)
        logger.log(logging.ERROR if is_ours else logging.WARNING, "%s", error.message)

    def _count_success(self, ending: Ending) -> None:
        durations, metrics = ending.durations, self._metrics
        metrics.request_success.inc()
        metrics.request_duration.observe(durations.total_s)
        metrics.request_validation_duration.observe(durations.validation_s)
        metrics.request_queue_duration.observe(durations.queue_s)
        metrics.request_inference_duration.observe(durations.inference_s)
        metrics.request_mean_time_per_token_duration.observe(durations.time_per_token_s)
        metrics.request_generated_tokens.observe(ending.generated.generated_tokens)
        logger.info(
            "Success total_time=%.6fs validation_time=%.6fs queue_time=%.6fs "
            "inference_time=%.6fs time_per_token=%.6fs seed=%s",
            durations.total_s,
            durations.validation_s,
            durations.queue_s,
            durations.inference_s,
            durations.time_per_token_s,
            ending.generated.seed,
        )
