"""Runs many prompts, a window of them at a time, and gives their results and their progress."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.service import ChatService, ToolCall
from text_generation_router.errors import RouterError, ValidationError
from text_generation_router.infer import Infer, gather_or_cancel
from text_generation_router.request import Ending, FinishReason, Token
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

WINDOW = 2
"""Prompts in flight per row of the batch: the next one is tokenized before a row becomes free, and
a million prompts do not become a million tasks."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    """Each with its id, text and log-probability."""
    top_tokens: tuple[tuple[Token, ...], ...]
    """The most likely tokens at each position, if `logprobs` is set."""
    finish_reason: str
    """`stop` for an end token, a stop string or the end of a grammar, else `length`."""
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended it."""
    reasoning: str | None = None
    """Only in chats: the reasoning before the answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only in chats: the functions that the model calls."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of `tokens`."""
        return tuple(token.id for token in self.tokens)

    @property
    def cumulative_logprob(self) -> float:
        """The sum over `tokens`."""
        return sum(token.logprob or 0.0 for token in self.tokens)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, or its error."""

    prompt: Any
    """As given: text, token ids or messages."""
    num_prompt_tokens: int = 0
    prompt_tokens: tuple[Token, ...] = ()
    """The prompt's tokens with their log-probabilities, if `prompt_logprobs` is set."""
    completions: tuple[CompletionOutput, ...] = ()
    """Empty if there is an error."""
    error: RouterError | None = None

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The `n` answers. Raises `error` if it is set, so that a failure is not overlooked."""
        if self.error is not None:
            raise self.error
        return self.completions


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and its parameters."""

    prompt: Any
    """As given by the user."""
    parameters: GenerateParameters | Conversation
    n: int = 1


@dataclass(slots=True)
class Tally:
    """Counters of one run. Its event loop changes them; any thread may read them."""

    total: int
    """Requests, including those of an earlier run."""
    done: int = 0
    """Requests that have ended, including failed ones and those of an earlier run."""
    failed: int = 0
    tokens: int = 0
    """Generated in this run."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> str:
        """The speed over the whole run, and how many requests have failed."""
        elapsed_s = max(time.perf_counter() - self.started, 1e-9)
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.tokens / elapsed_s:,.0f} tokens/s{failed}"


class _Bar(Progress):
    """Shows a tally whenever its own thread draws."""

    def __init__(self, tally: Tally, console: Console) -> None:
        self._tally = tally
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        rate = TextColumn("{task.fields[tally].rate}")
        is_drawn = console.is_terminal or console.is_jupyter
        super().__init__(*columns, rate, console=console, disable=not is_drawn)
        self.add_task("requests", total=tally.total, tally=tally)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar with the present counts."""
        for task in self.task_ids:
            self.update(task, completed=self._tally.done)
        return super().get_renderables()


@contextmanager
def bar(tally: Tally, file: TextIO) -> Iterator[bool]:
    """A bar during the block, on terminals and in notebooks; yields whether there is one."""
    with _Bar(tally, Console(file=file)) as progress:
        yield not progress.disable


async def run_jobs(services: Services, jobs: Sequence[Job], tally: Tally) -> list[RequestOutput]:
    """The result of each job, in order; a job's failure is the error of its result. Runs in the
    event loop of the services, whose batcher must be running. Cancelling this ends all jobs."""
    results: dict[int, RequestOutput] = {}
    pending = iter(enumerate(jobs))

    async def work() -> None:
        for place, job in pending:
            results[place] = await _run_one(services, job, tally)

    window = WINDOW * services.config.batch_rows
    await gather_or_cancel(work() for _ in range(min(window, len(jobs))))
    return [results[place] for place in range(len(jobs))]


async def _run_one(services: Services, job: Job, tally: Tally) -> RequestOutput:
    try:
        if isinstance(job.parameters, Conversation):
            found = await _chat(services.chat, job.prompt, job.parameters)
        else:
            found = await _text(services.infer, job.prompt, job.parameters, job.n)
    except UnicodeEncodeError as reason:
        error = ValidationError(f"the prompt is not Unicode text: {reason.reason}")
        found = RequestOutput(job.prompt, error=error)
    except RouterError as error:
        found = RequestOutput(job.prompt, error=error)
    tally.tokens += sum(len(one.tokens) for one in found.completions)
    tally.failed += found.error is not None
    tally.done += 1
    return found


async def _text(infer: Infer, prompt: Any, parameters: GenerateParameters, n: int) -> RequestOutput:
    results = await infer.generate_many(parameters, n)
    completions = [
        _completion(index, one.tokens, one.top_tokens, one.ending)
        for index, one in enumerate(results)
    ]
    [first, *_] = results
    prompt_tokens = first.prefill.tokens
    return RequestOutput(prompt, first.prompt_tokens, prompt_tokens, tuple(completions))


async def _chat(service: ChatService, prompt: Any, conversation: Conversation) -> RequestOutput:
    completions = []
    async with service.start(conversation) as generations:
        # All run at the same time, although they are read one after the other.
        for index, generation in enumerate(generations):
            message = await generation.collect()
            ending = generation.entry.ending
            assert ending is not None
            tokens = [output.token for output in message.outputs]
            tops = [output.top_tokens for output in message.outputs if output.top_tokens]
            completion = replace(
                _completion(index, tokens, tops, ending),
                text=message.content or "",
                reasoning=message.reasoning,
                tool_calls=message.tool_calls,
            )
            completions.append(completion)
    return RequestOutput(prompt, generations[0].entry.prompt_tokens, completions=tuple(completions))


def _completion(
    index: int, tokens: Sequence[Token], tops: Sequence[tuple[Token, ...]], ending: Ending
) -> CompletionOutput:
    generated = ending.generated
    reason = "length" if generated.finish_reason is FinishReason.LENGTH else "stop"
    text, stop = generated.text, generated.stop_reason
    return CompletionOutput(index, text, tuple(tokens), tuple(tops), reason, stop)
