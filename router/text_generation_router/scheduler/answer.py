"""The text side of one generation: ids in, tokens with text out."""

import math
from collections.abc import Sequence

from text_generation_router.request import (
    FinishReason,
    GeneratedText,
    PrefillOutput,
    Request,
    Timings,
    Token,
    TokenOutput,
)
from text_generation_router.scheduler.stop_strings import StopStrings
from text_generation_router.tokenizer import Tokenizer


class Answer:
    """Turns the shard's tokens into outputs and ends the text at a stop string.

    Promises: the texts of all tokens, joined, are what the model wrote, special tokens included and
    cut behind a stop string; `GeneratedText.text` is the same without the special tokens.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder()
        self._stop_strings = StopStrings(request.stopping.stop_sequences)
        self._text: list[str] = []
        self._num_tokens = 0

    def prefill(self, logprobs: Sequence[float]) -> PrefillOutput:
        """The prompt's tokens; one log-probability each."""
        return PrefillOutput(self._tokens(self._request.input_ids, logprobs))

    def step(
        self,
        token_id: int,
        logprob: float,
        finish_reason: FinishReason | None,
        top_tokens: tuple[Sequence[int], Sequence[float]] = ((), ()),
        timings: Timings | None = None,
    ) -> TokenOutput:
        """The output for the next token; `generated` and `timings` are set if it is the last.

        `finish_reason` is the shard's and wins over a stop string; the text is cut all the same.
        `top_tokens`: ids and log-probabilities.
        """
        self._num_tokens += 1
        is_end = finish_reason is FinishReason.EOS_TOKEN
        special = is_end or self._tokenizer.is_special(token_id)
        if special:
            # It interrupts a character that is not complete.
            visible = self._decoder.flush()
            text = visible + self._tokenizer.decode_each([token_id])[0]
        else:
            text = visible = self._decoder.step(token_id)
            if finish_reason is not None:
                text = visible = visible + self._decoder.flush()
        cut = self._stop_strings.search(text)
        if cut is not None:
            text, visible = text[:cut], visible[:cut]
            finish_reason = finish_reason or FinishReason.STOP_SEQUENCE
        self._text.append(visible)
        return TokenOutput(
            Token(token_id, text, _finite(logprob), special),
            visible,
            self._tokens(*top_tokens),
            None if finish_reason is None else self._generated(finish_reason),
            None if finish_reason is None else timings,
        )

    def _generated(self, finish_reason: FinishReason) -> GeneratedText:
        sampling = self._request.sampling
        seed = sampling.seed if sampling.is_sampling else None
        return GeneratedText("".join(self._text), self._num_tokens, finish_reason, seed)

    def _tokens(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Token, ...]:
        texts = self._tokenizer.decode_each(token_ids)
        return tuple(
            Token(token_id, text, _finite(logprob), self._tokenizer.is_special(token_id))
            for token_id, text, logprob in zip(token_ids, texts, logprobs, strict=True)
        )


def _finite(logprob: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return logprob if math.isfinite(logprob) else None
