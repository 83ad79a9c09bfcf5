"""A generation in progress, and what it ends with."""

import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from text_generation_router.callers import Allowance
from text_generation_router.errors import RouterError
from text_generation_router.request import (
    Ending,
    GeneratedText,
    Output,
    PrefillOutput,
    Token,
    TokenOutput,
)
from text_generation_router.scheduler.entry import Entry

if TYPE_CHECKING:
    from text_generation_router.tracing.requests import RequestTrace


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole generation; `top_tokens` has one entry per token, or is empty."""

    prompt_ids: tuple[int, ...]
    cached_tokens: int
    prefill: PrefillOutput
    tokens: tuple[Token, ...]
    top_tokens: tuple[tuple[Token, ...], ...]
    ending: Ending

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean over the generated tokens; -inf where it is not defined: the worst of all."""
        total = sum(math.nan if t.logprob is None else t.logprob for t in self.tokens)
        mean = total / len(self.tokens)
        return -math.inf if math.isnan(mean) else mean


class Generation:
    """A generation in progress: iterate it for lists of outputs that became ready together.

    `ending` is set with the last list, `error` when a failure is raised.
    """

    def __init__(
        self,
        entry: Entry,
        arrival: float,
        allowance: Allowance | None = None,
    ) -> None:
        self.prompt_tokens = len(entry.request.input_ids)
        self.ending: Ending | None = None
        self.error: RouterError | None = None
        self._entry = entry
        self._arrival = arrival
        self._allowance = allowance
        # Generated tokens that were charged to the allowance.
        self._num_charged = 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as the model reads it."""
        return self._entry.request.input_ids

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; known as soon as there is an output."""
        return self._entry.num_reused_tokens

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
            num_tokens = sum(isinstance(output, TokenOutput) for output in outputs)
            self._num_charged += num_tokens
            self._allowance.take(num_tokens, time.perf_counter())
        last = outputs[-1]
        if isinstance(last, TokenOutput) and last.generated is not None:
            self.ending = self._ended(last.generated)
        return outputs

    def charge_unread(self) -> None:
        """Charges the generated tokens that will never be read."""
        if self._allowance is not None and self.ending is None:
            unread = len(self._entry.token_ids) - self._num_charged
            self._allowance.take(unread, time.perf_counter())

    def end_trace(self, trace: "RequestTrace", otherwise: str) -> None:
        """Ends its span; `otherwise` is the error type if the generation has not ended."""
        error_type = otherwise if self.error is None else self.error.error_type
        trace.end(self._entry, self.ending, error_type)

    def hide(self) -> None:
        """Its client sees no token before the end."""
        self._entry.is_shown = False

    async def collect(self) -> GenerateResult:
        """Reads it to the end; raises its failure."""
        self.hide()
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

    def _ended(self, generated: GeneratedText) -> Ending:
        now, queued, started = time.perf_counter(), self._entry.queued, self._entry.started
        assert started is not None, "it has generated something"
        inference_s = now - started
        return Ending(
            generated,
            total_s=now - self._arrival,
            validation_s=queued - self._arrival,
            queue_s=started - queued,
            inference_s=inference_s,
            time_per_token_s=inference_s / max(1, generated.generated_tokens),
        )
