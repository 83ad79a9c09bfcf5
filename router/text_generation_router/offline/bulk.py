"""Runs many prompts, a window of them at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.service import ChatStep, message_of
from text_generation_router.errors import RouterError, ValidationError
from text_generation_router.infer import Ending, Generation
from text_generation_router.offline.progress import Tally
from text_generation_router.offline.results import CompletionOutput, RequestOutput
from text_generation_router.request import FinishReason, Output, PrefillOutput, Token, TokenOutput
from text_generation_router.services import Services
from text_generation_router.validation import GenerateParameters

# Prompts in flight per row of the batch: the next one is tokenized before a row becomes free, and a
# million prompts do not become a million tasks.
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and its parameters."""

    prompt: Any
    """As given by the user."""
    parameters: GenerateParameters | Conversation
    n: int = 1


class Bulk:
    """Runs jobs in the event loop of the services; their batcher must be running."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, jobs: Sequence[Job], tally: Tally) -> list[RequestOutput]:
        """The result of each job, in order; a job's failure is the error of its result.

        Cancelling this ends all jobs.
        """
        results: list[RequestOutput | None] = [None] * len(jobs)
        pending = iter(enumerate(jobs))

        async def work() -> None:
            for place, job in pending:
                results[place] = await self._run_one(job, tally)

        window = _WINDOW * self._services.config.batch_rows
        async with asyncio.TaskGroup() as group:
            for _ in range(min(window, len(jobs))):
                group.create_task(work())
        return [result for result in results if result is not None]

    async def _run_one(self, job: Job, tally: Tally) -> RequestOutput:
        try:
            if isinstance(job.parameters, Conversation):
                return await self._chat(job.prompt, job.parameters, tally)
            return await self._generate(job.prompt, job.parameters, job.n, tally)
        except UnicodeEncodeError as error:
            tally.failed += 1
            message = f"the prompt is not Unicode text: {error.reason}"
            return RequestOutput(job.prompt, error=ValidationError(message))
        except RouterError as error:
            tally.failed += 1
            return RequestOutput(job.prompt, error=error)
        finally:
            tally.done += 1

    async def _generate(
        self, prompt: Any, parameters: GenerateParameters, n: int, tally: Tally
    ) -> RequestOutput:
        completions: list[CompletionOutput] = []
        prompt_tokens: tuple[Token, ...] = ()
        async with self._services.infer.start_many(parameters, n) as generations:
            # All run at the same time, although they are read one after the other.
            for index, generation in enumerate(generations):
                outputs = await _read(generation, tally)
                prefill = [one for one in outputs if isinstance(one, PrefillOutput)]
                prompt_tokens = prefill[0].tokens if prefill else prompt_tokens
                tokens = [one for one in outputs if isinstance(one, TokenOutput)]
                assert generation.ending is not None
                completions.append(_completion(index, tokens, generation.ending))
        return RequestOutput(
            prompt, generations[0].prompt_tokens, prompt_tokens, tuple(completions)
        )

    async def _chat(self, prompt: Any, conversation: Conversation, tally: Tally) -> RequestOutput:
        completions: list[CompletionOutput] = []
        async with self._services.chat.start(conversation) as generations:
            for index, generation in enumerate(generations):
                steps: list[ChatStep] = []
                async for new in generation:
                    steps += new
                    tally.tokens += sum(len(step.outputs) for step in new)
                assert generation.ending is not None
                message = message_of(steps)
                whole = _completion(index, message.outputs, generation.ending)
                text, reasoning, calls = (
                    message.content or "",
                    message.reasoning,
                    message.tool_calls,
                )
                completions.append(replace(whole, text=text, reasoning=reasoning, tool_calls=calls))
        return RequestOutput(prompt, generations[0].prompt_tokens, completions=tuple(completions))


async def _read(generation: Generation, tally: Tally) -> list[Output]:
    """All outputs of a generation; counts its tokens."""
    outputs: list[Output] = []
    async for new in generation:
        outputs += new
        tally.tokens += sum(isinstance(one, TokenOutput) for one in new)
    return outputs


def _completion(index: int, outputs: Sequence[TokenOutput], ending: Ending) -> CompletionOutput:
    generated = ending.generated
    is_length = generated.finish_reason is FinishReason.LENGTH
    return CompletionOutput(
        index,
        generated.text,
        tuple(output.token for output in outputs),
        tuple(output.top_tokens for output in outputs if output.top_tokens),
        "length" if is_length else "stop",
        generated.stop_reason,
    )
