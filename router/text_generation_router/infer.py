"""What one user asked for, from its permits to its endings."""

import asyncio
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from text_generation_router.callers import ANYBODY, Allowance, Caller
from text_generation_router.errors import (
    GenerationError,
    IncompleteGenerationError,
    KeyLimitError,
    RouterError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.permits import Permits
from text_generation_router.request import (
    GeneratedText,
    Output,
    PrefillOutput,
    Request,
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

Asking = Callable[[], Awaitable[GenerateParameters]]


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

    prompt_ids: tuple[int, ...]
    cached_tokens: int
    prefill: PrefillOutput
    tokens: tuple[Token, ...]
    top_tokens: tuple[tuple[Token, ...], ...]
    ending: Ending

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean over the generated tokens; -inf where it is not defined, so that it never wins."""
        total = sum(math.nan if t.logprob is None else t.logprob for t in self.tokens)
        mean = total / len(self.tokens)
        return -math.inf if math.isnan(mean) else mean


class Generation:
    """A running generation: iterate it for lists of outputs that became ready together.

    `ending` is set once the last list was handed out, `error` when a failure was raised.
    """

    def __init__(
        self,
        entry: Entry,
        prompt_tokens: int,
        arrival: float,
        allowance: Allowance | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.ending: Ending | None = None
        self.error: RouterError | None = None
        self._entry = entry
        self._arrival = arrival
        self._allowance = allowance
        # Of its tokens those that were taken off the allowance.
        self._num_charged = 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as the model reads it."""
        return self._entry.request.input_ids

    @property
    def cached_tokens(self) -> int:
        """How much of the prompt others had computed; known as soon as there is an output."""
        return self._entry.num_reused_tokens or 0

    def __aiter__(self) -> AsyncIterator[list[Output]]:
        return self

    async def __anext__(self) -> list[Output]:
        if self.ending is not None:
            raise StopAsyncIteration
        try:
            outputs = await self._entry.next_outputs()
        except RouterError as error:
            self.error = error
            raise
        if self._allowance is not None:
            self._charge(outputs, self._allowance)
        last = outputs[-1]
        if isinstance(last, TokenOutput) and last.generated is not None:
            assert last.timings is not None
            self.ending = Ending(last.generated, self._durations(last.generated, last.timings))
        return outputs

    def charge_unread(self) -> None:
        """Takes the tokens off the allowance that were generated, but will never be read."""
        if self._allowance is not None and self.ending is None:
            unread = len(self._entry.token_ids) - self._num_charged
            self._allowance.take(unread, time.perf_counter())

    def _charge(self, outputs: Sequence[Output], allowance: Allowance) -> None:
        num_tokens = sum(isinstance(output, TokenOutput) for output in outputs)
        self._num_charged += num_tokens
        allowance.take(num_tokens, time.perf_counter())

    async def collect(self) -> GenerateResult:
        """Reads it to its end; raises its failure."""
        prefill = PrefillOutput(())
        tokens: list[Token] = []
        top_tokens: list[tuple[Token, ...]] = []
        async for outputs in self:
            for output in outputs:
                if isinstance(output, PrefillOutput):
                    prefill = output
                    continue
                tokens.append(output.token)
                top_tokens.append(output.top_tokens)
        assert self.ending is not None
        has_top_tokens = self._entry.request.top_n_tokens > 0
        return GenerateResult(
            self.prompt_ids,
            self.cached_tokens,
            prefill,
            tuple(tokens),
            tuple(top_tokens) if has_top_tokens else (),
            self.ending,
        )

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
    """Lets at most `max_concurrent_requests` generations run, whoever asks for them: those that
    work on behalf of different callers share the permits.
    """

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
        self._permits = Permits(max_concurrent_requests)
        self._caller = ANYBODY
        self._is_let_in = False

    def on_behalf_of(self, caller: Caller) -> "Infer":
        """The same for another caller: with its salt, within its limits."""
        other = copy.copy(self)
        other._caller = caller
        return other

    @contextmanager
    def let_in(self, num: int) -> Iterator["Infer"]:
        """`admitted`, and the same within it: nothing is let in one by one, nor logged when it ends
        well. What is refused is counted as one failure."""
        other = copy.copy(self)
        other._is_let_in = True
        with ExitStack() as stack:
            try:
                stack.enter_context(self.admitted(num))
            except RouterError as error:
                self._refuse(error)
                raise
            yield other

    def num_at_once(self, wanted: int) -> int:
        """Of prompts that one request brings, how many are let in together: not more than half of
        what is free, nor than the caller may have under way, and at least one."""
        most = max(1, min(wanted, self.free_permits // 2))
        allowance = self._caller.allowance
        return most if allowance is None else min(most, allowance.num_free or most)

    @property
    def free_permits(self) -> int:
        """How many more generations would be let in now."""
        return self._permits.num_free

    def check_could_fit(self, num: int) -> None:
        """Raises OverloadedError for more generations in one request than could ever be let in,
        and ValidationError for more than the caller may ever have under way."""
        if self._caller.allowance is not None:
            self._caller.allowance.check_could_fit(num)
        self._permits.check_could_fit(num)

    @asynccontextmanager
    async def start(
        self, asked: GenerateParameters, is_stream: bool = False
    ) -> AsyncIterator[Generation]:
        """`start_many` of one."""
        async with self.start_many(asked, 1, is_stream) as [generation]:
            yield generation

    @asynccontextmanager
    async def start_many(
        self, asked: GenerateParameters | Asking, num_sequences: int, is_stream: bool = False
    ) -> AsyncIterator[list[Generation]]:
        """Permits (a sequence each, all or none), validation, submission: generations over one
        prompt, which is computed once. Sequence i draws with the seed + i; prompt log-probabilities
        come with the first alone. What is asked for may be made behind the permits.

        Leaving the block cancels what still runs. A failure is raised where that generation is
        iterated. Of each generation exactly one of success, failure and dropped is counted; what
        never started is one failure. Raises RouterError.
        """
        arrival = time.perf_counter()
        generations: list[Generation] = []
        try:
            if is_stream and isinstance(asked, GenerateParameters):
                check_stream(asked)
            with self.admitted(num_sequences):
                if not isinstance(asked, GenerateParameters):
                    asked = await asked()
                request = await self._validation.validate(asked)
                requests = _sequences(request, num_sequences, self._caller.salt)
                entries = self._batcher.submit_many(requests)
                prompt_tokens, allowance = len(request.input_ids), self._caller.allowance
                if allowance is not None:
                    allowance.take(prompt_tokens, time.perf_counter())
                    if request.is_prompt_only:
                        allowance = None
                generations = [
                    Generation(entry, prompt_tokens, arrival, allowance) for entry in entries
                ]
                try:
                    yield generations
                finally:
                    for entry, generation in zip(entries, generations, strict=True):
                        self._batcher.cancel(entry)
                        generation.charge_unread()
        except RouterError as error:
            if isinstance(error, KeyLimitError):
                self._metrics.request_key_limit.inc(reason=error.reason)
            if all(error is not generation.error for generation in generations):
                _log_failure(error)
            self._count(generations, error.metric_label)
            raise
        except Exception:  # a bug; whoever answers the client reports it
            self._count(generations, RouterError.metric_label)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._count(generations, "dropped")
            raise
        self._count(generations, "dropped")

    async def generate(self, asked: GenerateParameters | Asking) -> GenerateResult:
        """One whole generation."""
        [result] = await self.generate_many(asked, 1)
        return result

    async def generate_many(
        self,
        asked: GenerateParameters | Asking,
        num_sequences: int,
        check_prompt: Callable[[int], None] | None = None,
    ) -> list[GenerateResult]:
        """Whole generations over one prompt; one failure fails all. `check_prompt` is called with
        the number of the prompt's tokens, and may raise RouterError."""
        async with self.start_many(asked, num_sequences) as generations:
            if check_prompt is not None:
                check_prompt(generations[0].prompt_tokens)
            tasks = [asyncio.create_task(generation.collect()) for generation in generations]
            try:
                results = list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
        # The prompt is the same, and so are its log-probabilities.
        return [replace(result, prefill=results[0].prefill) for result in results]

    async def generate_best_of(
        self, asked: GenerateParameters
    ) -> tuple[GenerateResult, list[GenerateResult]]:
        """`best_of` generations (1 when not given) with seeds of their own: the best, the others.

        The best has the highest mean log-probability, the first of equals. One failure fails all.
        """
        best_of = 1 if asked.best_of is None else asked.best_of
        if best_of != 1:
            try:
                check_best_of(best_of, self._validation.limits)
            except RouterError as error:
                self._refuse(error)
                raise
        results = await self.generate_many(asked, best_of)
        winner = max(range(best_of), key=lambda index: results[index].mean_logprob)
        return results.pop(winner), results

    @contextmanager
    def admitted(self, num: int) -> Iterator[None]:
        """Within the limits of the caller and the server. Raises KeyLimitError, OverloadedError."""
        if self._is_let_in:
            yield
            return
        allowance = self._caller.allowance
        if allowance is None:
            with self._permits.taken(num):
                yield
            return
        allowance.enter(num, time.perf_counter())
        try:
            with self._permits.taken(num):
                yield
        finally:
            allowance.leave(num)

    def _refuse(self, error: RouterError) -> None:
        """Counts and logs what never started."""
        if isinstance(error, KeyLimitError):
            self._metrics.request_key_limit.inc(reason=error.reason)
        _log_failure(error)
        self._count((), error.metric_label)

    def _count(self, generations: Sequence[Generation], otherwise: str) -> None:
        """Counts how each generation ended; `otherwise` labels those that did not, or all of it."""
        for generation in generations:
            if generation.ending is not None:
                self._count_success(generation.ending)
            elif generation.error is not None:
                _log_failure(generation.error)
                self._metrics.request_failure.inc(err=generation.error.metric_label)
            else:
                self._metrics.request_failure.inc(err=otherwise)
        if not generations:
            self._metrics.request_failure.inc(err=otherwise)

    def _count_success(self, ending: Ending) -> None:
        durations, metrics = ending.durations, self._metrics
        metrics.request_success.inc()
        metrics.request_duration.observe(durations.total_s)
        metrics.request_validation_duration.observe(durations.validation_s)
        metrics.request_queue_duration.observe(durations.queue_s)
        metrics.request_inference_duration.observe(durations.inference_s)
        metrics.request_mean_time_per_token_duration.observe(durations.time_per_token_s)
        metrics.request_generated_tokens.observe(ending.generated.generated_tokens)
        if self._is_let_in:
            return
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


def _sequences(request: Request, num: int, salt: str) -> list[Request]:
    """So many requests for one prompt that differ in their seeds alone, with the caller's salt.

    All salts of a server's callers are of one length, so that a request's own, which comes behind,
    can not make another caller's of it.
    """
    cache_salt = salt + request.cache_salt
    return [
        replace(
            request,
            sampling=replace(request.sampling, seed=(request.sampling.seed + place) % 2**64),
            prefill_logprobs=request.prefill_logprobs and place == 0,
            cache_salt=cache_salt,
        )
        for place in range(num)
    ]


def _log_failure(error: RouterError) -> None:
    is_ours = isinstance(error, GenerationError | IncompleteGenerationError)
    logger.log(logging.ERROR if is_ours else logging.WARNING, "%s", error.log_message)
