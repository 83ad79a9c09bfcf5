"""Fields that vLLM adds to the answers of OpenAI's routes."""

from collections.abc import Sequence
from typing import Any

from text_generation_router.api.numbers import float32
from text_generation_router.api.v1_errors import RequestError
from text_generation_router.request import PrefillOutput, Token
from text_generation_router.validation import GenerateParameters

Json = dict[str, Any]
# Replaces a log-probability that is not finite.
_LOWEST = -9999.0
# Bounds the memory and the time of one answer.
MOST_PROMPT_ENTRIES = 2**19
_FEW_ENTRIES = 4096


class PromptEntries:
    """Counts the log-probabilities of prompts that one answer has, each choice with its own."""

    def __init__(self, asked: GenerateParameters, num_choices: int, field: str) -> None:
        """`num_choices`: of each prompt; `field`: the one that requests them."""
        tokens_each = 1 + (asked.top_n_tokens or 0)
        self._per_token = num_choices * tokens_each if asked.decoder_input_details else 0
        self._field = field
        self._num = 0

    @property
    def are_many(self) -> bool:
        """Whether a thread should make the answer, so that streams do not wait."""
        return self._num > _FEW_ENTRIES

    def add(self, prompt_tokens: int) -> None:
        """One more prompt. Raises RequestError where the answer would have too many."""
        self._num += prompt_tokens * self._per_token
        if self._num > MOST_PROMPT_ENTRIES:
            raise RequestError(
                f"`{self._field}` asks for at least {self._num} log-probabilities of prompts; one "
                f"answer can have {MOST_PROMPT_ENTRIES}: send fewer prompts, or ask for fewer of "
                "the best tokens or of the answers",
                self._field,
            )


def prompt_logprobs(prompt: PrefillOutput, num_top: int) -> list[Json | None]:
    """By token of the prompt: its own log-probability and those of the best, by their ids; null for
    the first, which nothing precedes."""
    places: list[Json | None] = []
    for place, token in enumerate(prompt.tokens):
        if place == 0:
            places.append(None)
            continue
        best = prompt.top_tokens[place][:num_top] if prompt.top_tokens else ()
        rank = prompt.ranks[place] if place < len(prompt.ranks) else None
        # The token itself comes first, also where it is one of the best.
        ranked = [(token, rank), *((other, at) for at, other in enumerate(best, start=1))]
        places.append(_by_id(ranked))
    return places


def _by_id(ranked: Sequence[tuple[Token, int | None]]) -> Json:
    found: Json = {}
    for one, rank in ranked:
        number = float32(one.logprob)
        found.setdefault(
            str(one.id),
            {
                "logprob": _LOWEST if number is None else number,
                "rank": rank,
                "decoded_token": one.text,
            },
        )
    return found
