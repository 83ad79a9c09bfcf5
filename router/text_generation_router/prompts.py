"""Many prompts of one request that are asked about and not continued: a few at a time."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_router.infer import Asking, Ending, Infer
from text_generation_router.request import PrefillOutput
from text_generation_router.validation import GenerateParameters

logger = logging.getLogger(__name__)

MOST_PROMPTS = 2048
"""Of one request, as OpenAI has it."""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What is known of one prompt. Its ids are not kept: a long query stands before each of
    `MOST_PROMPTS` documents."""

    prompt_tokens: int
    prefill: PrefillOutput
    ending: Ending


async def read_prompts(
    infer: Infer, asked: Sequence[GenerateParameters | Asking]
) -> list[PromptResult]:
    """What is known of each prompt, in order; the first failure fails, and ends, all.

    All together hold as many permits as are computed at once, at most half of those that are free,
    until the last is done. Raises RouterError.
    """
    results: dict[int, PromptResult] = {}
    waiting = iter(enumerate(asked))
    num_at_once = infer.num_at_once(len(asked))

    async def read(infer: Infer) -> None:
        for place, one in waiting:
            made = await infer.generate(one)
            results[place] = PromptResult(made.prompt_tokens, made.prefill, made.ending)

    began = time.perf_counter()
    with infer.let_in(num_at_once) as inside:
        tasks = [asyncio.create_task(read(inside)) for _ in range(num_at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    num_tokens = sum(result.prompt_tokens for result in results.values())
    logger.info(
        "Success prompts=%d prompt_tokens=%d total_time=%.6fs",
        *(len(asked), num_tokens, time.perf_counter() - began),
    )
    return [results[place] for place in range(len(asked))]
