"""Many prompts of one request that are read and not continued: a few at a time."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_router.infer import Asking, Infer, gather_or_cancel
from text_generation_router.request import Ending, PrefillOutput
from text_generation_router.validation import GenerateParameters

logger = logging.getLogger(__name__)

MOST_PROMPTS = 2048
"""Of one request; OpenAI's limit."""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of one prompt. It holds no ids: each of `MOST_PROMPTS` documents may have a long
    query in front."""

    prompt_tokens: int
    prefill: PrefillOutput
    ending: Ending


async def read_prompts(
    infer: Infer, asked: Sequence[GenerateParameters | Asking]
) -> list[PromptResult]:
    """The results of all prompts, in order; the first failure cancels the rest.

    It holds as many permits as prompts run at once, at most half of the free ones, until the last
    is done. Raises RouterError.
    """
    results: dict[int, PromptResult] = {}
    waiting = iter(enumerate(asked))
    num_at_once = infer.num_at_once(len(asked))

    async def read(infer: Infer) -> None:
        for place, one in waiting:
            [made] = await infer.generate_many(one, 1)
            results[place] = PromptResult(made.prompt_tokens, made.prefill, made.ending)

    began = time.perf_counter()
    with infer.holding_permits(num_at_once) as inside:
        await gather_or_cancel(read(inside) for _ in range(num_at_once))
    num_tokens = sum(result.prompt_tokens for result in results.values())
    logger.info(
        "Success prompts=%d prompt_tokens=%d total_time=%.6fs",
        *(len(asked), num_tokens, time.perf_counter() - began),
    )
    return [results[place] for place in range(len(asked))]
