"""What vLLM adds to the answers of OpenAI's routes, where it is asked for."""

from collections.abc import Sequence
from typing import Any

from text_generation_router.api.numbers import float32
from text_generation_router.request import GeneratedText, PrefillOutput, Token
from text_generation_router.tokenizer import Tokenizer

Json = dict[str, Any]
# What stands for a token that has next to no probability.
_LOWEST = -9999.0


def stop_reason(generated: GeneratedText) -> str | int | None:
    """The stop string or the stop token that ended the text; None: nothing, or an end token."""
    if generated.stop_sequence is not None:
        return generated.stop_sequence
    return generated.stop_token_id


def prompt_logprobs(prompt: PrefillOutput, num_top: int, tokenizer: Tokenizer) -> list[Json | None]:
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
        places.append(_by_id(ranked, tokenizer))
    return places


def _by_id(ranked: Sequence[tuple[Token, int | None]], tokenizer: Tokenizer) -> Json:
    found: Json = {}
    for one, rank in ranked:
        number = float32(one.logprob)
        found.setdefault(
            str(one.id),
            {
                "logprob": _LOWEST if number is None else number,
                "rank": rank,
                "decoded_token": tokenizer.decode_each([one.id])[0],
            },
        )
    return found
